// What decode.cu has seen of a sequence: by one warp, by the warps of a block, by several blocks.

// The softmax of GROUP heads over what one warp has seen: a lane has rows lane / 4 and 8 below, pairs of columns.
struct Seen {
    float top[ROWS / 8], sum[ROWS / 8], o[DIM / 8][4];

    __device__ Seen() {
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) top[h] = NOTHING, sum[h] = 0;
#pragma unroll
        for (int i = 0; i < DIM / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) o[i][j] = 0;
    }
    __device__ void take_newest(const Heads& heads) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            top[h] = lane / 4 + h * 8 < GROUP ? heads.scores[lane / 4 + h * 8] : 0, sum[h] = lane % 4 == 0;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) o[i][h * 2 + j] = wide(heads.v[i * 8 + lane % 4 * 2 + j]);
        }
    }
    // 16 tokens, of which those from `from` to `to` count.
    __device__ void take(float (&s)[2][4], int from, int to, float scale, float cap) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            float best = top[h], total = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
                float& x = s[i / 2][h * 2 + i % 2];
                x = token >= from && token < to ? score<CAPPED>(x, scale, cap) : NOTHING;
                best = fmaxf(best, x);
            }
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float shrink = power(top[h] - best);  // some token counts: best is a number
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = s[i / 2][h * 2 + i % 2];
                total += x = power(x - best);
            }
            top[h] = best, sum[h] = sum[h] * shrink + total;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) o[i][h * 2] *= shrink, o[i][h * 2 + 1] *= shrink;
        }
    }
    // To shared memory: tops and sums [2, GROUP], values [GROUP, DIM].
    __device__ void store(float* tops, float* values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            float all = sum[h];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            const int row = lane / 4 + h * 8;
            if (row >= GROUP) continue;
            if (lane % 4 == 0) tops[row] = top[h], tops[GROUP + row] = all;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                *(float2*)(values + row * DIM + i * 8 + lane % 4 * 2) = make_float2(o[i][h * 2], o[i][h * 2 + 1]);
        }
    }
};

__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }  // the four warps

struct Part {  // of what is known of a head: the mean of values, of which a lane has DIM / 32, and its weight's logarithm
    Vec<float, DIM / 32> mean;
    float weight;
};

// What the four warps have stored of head g.
__device__ inline Part merge(const float* tops, const float* values, int g) {
    Part part = {{}, NOTHING};
    float top = NOTHING, sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * 2 * GROUP + g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float by = top == NOTHING ? 0 : power(tops[w * 2 * GROUP + g] - top);
        const float* from = values + (w * GROUP + g) * DIM + threadIdx.x % 32 * (DIM / 32);
        const auto y = *(const Vec<float, DIM / 32>*)from;
        sum += by * tops[(w * 2 + 1) * GROUP + g];
#pragma unroll
        for (int d = 0; d < DIM / 32; d++) part.mean.x[d] += by * y.x[d];
    }
    const float by = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int d = 0; d < DIM / 32; d++) part.mean.x[d] *= by;
    if (sum > 0) part.weight = top + log2f(sum);
    return part;
}

__device__ inline void store_out(T* to, const Part& part) {
    Vec<unsigned, DIM / 64> y;
#pragma unroll
    for (int d = 0; d < DIM / 64; d++) y.x[d] = both<T>(part.mean.x[2 * d], part.mean.x[2 * d + 1]);
    *(Vec<unsigned, DIM / 64>*)(to + threadIdx.x % 32 * (DIM / 32)) = y;
}

// Where a run's part of a sequence is stored that begins there, as a run's last one may, or does not, as its first one may.
__device__ inline int place(int run, int head, bool begins, int g) {
    return ((run * KV_HEADS + head) * 2 + begins) * GROUP + g;
}

__device__ inline void store_part(const Step& step, int place, const Part& part) {
    const int lane = threadIdx.x % 32;
    *(Vec<float, DIM / 32>*)(step.parts + place * DIM + lane * (DIM / 32)) = part.mean;
    if (lane == 0) step.sums[place] = part.weight;
}

__device__ inline Part load_part(const Step& step, int place) {
    Part part;
    const float* from = step.parts + place * DIM + threadIdx.x % 32 * (DIM / 32);
#pragma unroll
    for (int d = 0; d < DIM / 32; d += 2) {
        const float2 y = __ldcg((const float2*)(from + d));
        part.mean.x[d] = y.x, part.mean.x[d + 1] = y.y;
    }
    part.weight = __ldcg(step.sums + place);
    return part;
}

// All of a sequence's head g: `part` is its beginning, the other parts have been stored.
__device__ inline Part add_up(const Step& step, Part part, const Border& divided, int head, int g) {
    constexpr int AHEAD = 8;
    float sum = part.weight == NOTHING ? 0 : 1;
    for (int i = 1; i < divided.count; i += AHEAD) {
        Part next[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            next[j] = {{}, NOTHING};  // or the compiler would keep registers for it in all of the kernel
            if (i + j < divided.count) next[j] = load_part(step, place(divided.first + i + j, head, false, g));
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (i + j >= divided.count) break;
            const float top = fmaxf(part.weight, next[j].weight);
            const float old = part.weight == NOTHING ? 0 : power(part.weight - top);
            const float by = next[j].weight == NOTHING ? 0 : power(next[j].weight - top);
            part.weight = top, sum = fmaf(sum, old, by);
#pragma unroll
            for (int d = 0; d < DIM / 32; d++) part.mean.x[d] = fmaf(part.mean.x[d], old, by * next[j].mean.x[d]);
        }
    }
    const float by = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int d = 0; d < DIM / 32; d++) part.mean.x[d] *= by;
    return part;
}

// How many blocks have stored their parts, which those may load who meet this thread afterwards.
__device__ inline int stored(const int* count) {
    int y;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(y) : "l"(count) : "memory");
    return y;
}

// One more block, whose threads have met; how many had before.
__device__ inline int add_one(int* count) {
    int y;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(y) : "l"(count) : "memory");
    return y;
}
