// What decode.cu has seen of a sequence: by one warp, by the warps of a block, by several blocks.

// The softmax of GROUP heads over what one warp has seen, tokens as rows and heads as columns: of each 8 heads a lane
// has the two from lane % 4 * 2 on, of each 16 elements of a value the two of `element`: those at lane / 4 and 8 below,
// or where FP8 neighbours, as fp8_operand.cuh hands them over. Where FP8, `o` adds up codes, and a token's weight and `top` have
// its value's scale in them, which `sum` has not: o / sum is the mean of values.
struct OnlineSoftmax {
    float top[ROWS / 8][2], sum[ROWS / 8][2], o[DIM / 16][ROWS / 8][4];

    __device__ static int element(int j) {
        const int lane = threadIdx.x % 32;
        return FP8 ? lane / 4 * 2 + j : lane / 4 + j * 8;
    }
    __device__ OnlineSoftmax() {
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            top[h][0] = top[h][1] = MINUS_INFINITY, sum[h][0] = sum[h][1] = 0;
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[i][h][j] = 0;
        }
    }
    __device__ void take_newest(const Heads& heads) {
        const int lane = threadIdx.x % 32;
        const float log = FP8 ? heads.v_exponent - 127 : 0, inverse = FP8 ? inverse_scale(heads.v_exponent) : 1;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int head = h * 8 + lane % 4 * 2 + j;
                top[h][j] = head < GROUP ? heads.scores[head] + log : 0, sum[h][j] = lane < 4 ? inverse : 0;
            }
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[i][h][j] = to_float(heads.v[i * 16 + element(j / 2)]);
        }
    }
    // 16 tokens, of which those from `from` to `to` count: p will be their weights as the second operand of matmuls.
    __device__ void take(float (&s)[2][4], int from, int to, float scale, float softcap, const TileScales& by,
                         unsigned (&p)[ROWS / 8][2]) {
        const int lane = threadIdx.x % 32;
        const float inverses[2] = {FP8 ? by.inverses[0] : 1, FP8 ? by.inverses[1] : 1};
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = i / 2 * 8 + lane / 4;
                float y = score<SOFTCAP>(FP8 ? s[h][i] * by.keys[i / 2] : s[h][i], scale, softcap);
                if (FP8) y += by.logs[i / 2];
                s[h][i] = token >= from && token < to ? y : MINUS_INFINITY;
            }
            float best[2] = {fmaxf(s[h][0], s[h][2]), fmaxf(s[h][1], s[h][3])};
            across(best);
            float shrink[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                best[j] = fmaxf(best[j] - LIFT, top[h][j]);
                shrink[j] = exp2_approx(top[h][j] - best[j]);  // some token counts: best is a number
                top[h][j] = best[j];
                s[h][j] = exp2_approx(s[h][j] - best[j]), s[h][2 + j] = exp2_approx(s[h][2 + j] - best[j]);
                sum[h][j] = sum[h][j] * shrink[j] + s[h][j] * inverses[0] + s[h][2 + j] * inverses[1];
            }
            p[h][0] = transpose_8x8(pack<Operand>(s[h][0], s[h][1])), p[h][1] = transpose_8x8(pack<Operand>(s[h][2], s[h][3]));
            if (!__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) continue;
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[i][h][j] *= shrink[j % 2];
        }
    }
    // The largest of the lanes with the same heads: half of them look for one's, half for the other's.
    __device__ static void across(float (&best)[2]) {
        const bool upper = threadIdx.x & 16;
        float mine = upper ? best[1] : best[0], other = upper ? best[0] : best[1];
        mine = fmaxf(mine, __shfl_xor_sync(~0u, other, 16));
        mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 8));
        mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 4));
        other = __shfl_xor_sync(~0u, mine, 16);
        best[0] = upper ? other : mine, best[1] = upper ? mine : other;
    }
    // To shared memory: tops and sums [2, GROUP], values [GROUP, DIM].
    __device__ void store(float* tops, float* values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float all = sum[h][j];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) all += __shfl_xor_sync(~0u, all, step);
                const int head = h * 8 + lane % 4 * 2 + j;
                if (head >= GROUP) continue;
                if (lane < 4) tops[head] = top[h][j], tops[GROUP + head] = all;
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) {
                    float* const to = values + head * DIM + i * 16;
                    to[element(0)] = o[i][h][j], to[element(1)] = o[i][h][2 + j];
                }
            }
    }
};

constexpr int SHARE = 2 * PAIRS;  // of a head's elements, of a lane
typedef Vec<float, SHARE> Mean;

struct Part {  // of what is known of a head: the lane's share of the mean of values, and its weight's logarithm
    Mean mean;
    float weight;
};

// What those warps have stored of head g.
__device__ inline Part merge(const float* tops, const float* values, int g) {
    Part part = {{}, MINUS_INFINITY};
    float top = MINUS_INFINITY, sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * 2 * GROUP + g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float by = top == MINUS_INFINITY ? 0 : exp2_approx(tops[w * 2 * GROUP + g] - top);
        const float* from = values + (w * GROUP + g) * DIM + head_lane() * SHARE;
        const auto y = *(const Mean*)from;
        sum += by * tops[(w * 2 + 1) * GROUP + g];
#pragma unroll
        for (int d = 0; d < SHARE; d++) part.mean.x[d] += by * y.x[d];
    }
    const float by = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int d = 0; d < SHARE; d++) part.mean.x[d] *= by;
    if (sum > 0) part.weight = top + log2f(sum);
    return part;
}

__device__ inline void store_out(T* to, const Part& part) {
    Vec<unsigned, SHARE / 2> y;
#pragma unroll
    for (int d = 0; d < SHARE / 2; d++) y.x[d] = pack<T>(part.mean.x[2 * d], part.mean.x[2 * d + 1]);
    *(Vec<unsigned, SHARE / 2>*)(to + head_lane() * SHARE) = y;
}

// Where a run's part of a sequence is stored that begins there, as a run's last one may, or does not, as its first one
// may.
__device__ inline int place(int run, int head, bool begins, int g) {
    return ((run * KV_HEADS + head) * 2 + begins) * GROUP + g;
}

__device__ inline void store_part(const Step& step, int place, const Part& part) {
    const int lane = threadIdx.x % 32;
    *(Mean*)(step.parts + place * DIM + head_lane() * SHARE) = part.mean;
    if (lane == 0) step.sums[place] = part.weight;
}

__device__ inline Mean load_mean(const Step& step, int place) {
    constexpr int AT_ONCE = SHARE < 4 ? 2 : 4;
    Mean mean;
    const float* from = step.parts + place * DIM + head_lane() * SHARE;
#pragma unroll
    for (int d = 0; d < SHARE; d += AT_ONCE)
        if constexpr (AT_ONCE == 2) {
            const float2 y = __ldcg((const float2*)(from + d));
            mean.x[d] = y.x, mean.x[d + 1] = y.y;
        } else {
            const float4 y = __ldcg((const float4*)(from + d));
            mean.x[d] = y.x, mean.x[d + 1] = y.y, mean.x[d + 2] = y.z, mean.x[d + 3] = y.w;
        }
    return mean;
}

__device__ inline Part load_part(const Step& step, int place) {
    return {load_mean(step, place), __ldcg(step.sums + place)};
}

// All of a sequence's head g: `part` is its beginning, the other parts have been stored. Of 32 parts at a time a lane
// each has the weight, and two batches of means are under way.
__device__ inline Part add_up(const Step& step, Part part, const Border& divided, int head, int g) {
    constexpr int BATCH = 32 / SHARE, APART = KV_HEADS * 2 * GROUP;  // of two runs' places
    const int lane = threadIdx.x % 32;
    float sum = 0;  // to be added up over the lanes
#pragma unroll 1
    for (int begin = 1; begin < divided.count; begin += 32) {
        const int first = place(divided.first + begin, head, false, g), left = divided.count - begin;
        Mean means[2][BATCH];
        auto load = [&](int batch) {
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                means[batch % 2][j] = {};
                const int i = batch * BATCH + j;
                if (i < left) means[batch % 2][j] = load_mean(step, first + i * APART);
            }
        };
        const float mine = lane < left ? __ldcg(step.sums + first + lane * APART) : MINUS_INFINITY;
        load(0), load(1);
        const float top = fmaxf(part.weight, warp_max(mine));
        const float old = part.weight == MINUS_INFINITY ? 0 : exp2_approx(part.weight - top);
        const float by = mine == MINUS_INFINITY ? 0 : exp2_approx(mine - top);
        sum = (begin > 1 ? sum * old : lane == 0 ? old : 0) + by;  // of `part` itself 1
        part.weight = top;
#pragma unroll
        for (int d = 0; d < SHARE; d++) part.mean.x[d] *= old;
#pragma unroll
        for (int batch = 0; batch < 32 / BATCH; batch++) {
            if (batch * BATCH >= left) break;
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const float of_part = __shfl_sync(~0u, by, batch * BATCH + j);
#pragma unroll
                for (int d = 0; d < SHARE; d++)
                    part.mean.x[d] = fmaf(of_part, means[batch % 2][j].x[d], part.mean.x[d]);
            }
            if (batch + 2 < 32 / BATCH) load(batch + 2);
        }
    }
    sum = warp_sum(sum);
    const float by = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int d = 0; d < SHARE; d++) part.mean.x[d] *= by;
    if (SINKS && sum > 0) part.weight += log2f(sum);
    return part;
}

// All of a sequence's head, whose sink takes part in its softmax: a logit without a value.
__device__ inline Part with_sink(Part part, float sink) {
    const float by = 1 / (1 + exp2_approx(sink * LOG2_E - part.weight));  // 0 of an empty sequence
#pragma unroll
    for (int d = 0; d < SHARE; d++) part.mean.x[d] *= by;
    return part;
}
