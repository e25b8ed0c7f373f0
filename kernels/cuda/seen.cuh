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

__device__ inline void store_out(T* to, float4 x, float by) {
    Vec<T, 4> y = {narrow<T>(x.x * by), narrow<T>(x.y * by), narrow<T>(x.z * by), narrow<T>(x.w * by)};
    *(Vec<T, 4>*)to = y;
}

// What the four warps have stored as one result: the heads' own, or a part of it in the slot `part`.
__device__ inline void merge(const Step& step, const float* tops, const float* values, T* out, int part) {
    for (int i = threadIdx.x; i < GROUP * DIM / 4; i += THREADS) {
        const int g = i / (DIM / 4), d = i % (DIM / 4) * 4;
        float top = NOTHING, sum = 0;
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * 2 * GROUP + g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float by = top == NOTHING ? 0 : power(tops[w * 2 * GROUP + g] - top);
            const float4 y = *(const float4*)(values + (w * GROUP + g) * DIM + d);
            sum += by * tops[(w * 2 + 1) * GROUP + g];
            x.x += by * y.x, x.y += by * y.y, x.z += by * y.z, x.w += by * y.w;
        }
        const float by = sum > 0 ? 1 / sum : 0;
        if (part < 0) {
            store_out(out + g * DIM + d, x, by);
        } else {
            *(float4*)(step.parts + (part * GROUP + g) * DIM + d) = make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
            if (d == 0) step.sums[part * GROUP + g] = sum > 0 ? top + log2f(sum) : NOTHING;
        }
    }
}

// The parts of `count` runs from `first` on, which all have been stored, as the heads' result.
__device__ inline void add_up(const Step& step, int first, int count, int head, T* out) {
    const int lane = threadIdx.x % 32;
    auto slot = [&](int i) { return ((first + i) * KV_HEADS + head) * 2 + (i == 0); };
    for (int g = threadIdx.x / 32; g < GROUP; g += WARPS) {
        float top = NOTHING, total = 0;
        for (int i = lane; i < count; i += 32) top = fmaxf(top, __ldcg(step.sums + slot(i) * GROUP + g));
#pragma unroll
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        float x[DIM / 32] = {};
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            const float by = top == NOTHING ? 0 : power(__ldcg(step.sums + slot(i) * GROUP + g) - top);
            const float* from = step.parts + (slot(i) * GROUP + g) * DIM + lane * (DIM / 32);
            total += by;
#pragma unroll
            for (int d = 0; d < DIM / 32; d += 2) {
                const float2 y = __ldcg((const float2*)(from + d));
                x[d] += by * y.x, x[d + 1] += by * y.y;
            }
        }
        const float by = total > 0 ? 1 / total : 0;
#pragma unroll
        for (int d = 0; d < DIM / 32; d++) out[g * DIM + lane * (DIM / 32) + d] = narrow<T>(x[d] * by);
    }
}
