// Parts of a sequence, for mla_decode.cu and mla_decode_e4m3.cu: which tokens a block takes, how a head's weights are summed,
// and how parts are added up.

// The KV split `split` of a sequence, of at most `most`; fill: splits that find a multiprocessor idle.
struct Span {
    int count, start, stop;  // splits of the sequence; this one's tokens

    __device__ Span(int length, int split, int most, int fill) {
        const int tiles = (length + TILE - 1) / TILE, wanted = max((length + SPLIT / 2) / SPLIT, min(tiles, fill));
        const int each = max((tiles + max(min(wanted, most), 1) - 1) / max(min(wanted, most), 1), 1) * TILE;
        count = max((length + each - 1) / each, 1);
        start = split * each, stop = min(start + each, length);
    }
    __device__ int tiles() const { return (stop - start + TILE - 1) / TILE; }
};

// What a sequence without tokens has, of so many heads.
__device__ inline void store_zeros(T* to, int heads) {
    grid_wait();
    launch_dependents();
    for (int i = threadIdx.x; i < heads * LATENT / 8; i += THREADS) ((uint4*)to)[i] = make_uint4(0, 0, 0, 0);
}

// The softmax of two heads so far, one for each 16 lanes of a warp.
struct SoftmaxState {
    float top = MINUS_INFINITY, sum = 0;  // the head's; this lane's

    __device__ static int head() { return threadIdx.x / 16; }
    // What a head's values are to be multiplied by, and the logarithm of its sum.
    __device__ void finish(float* inverse, float* logarithm) {
#pragma unroll
        for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 16 == 0) inverse[head()] = 1 / sum, logarithm[head()] = top + log2f(sum);
    }
};

// A part: means of values, and of this thread's two rows the logarithms of sums.
struct Part {
    Values mean;
    float weight[2];

    __device__ void store(float* to) const {
        const int thread = threadIdx.x, lane = thread % 32;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            const float* o = mean.o[n];
            ((float4*)to)[n * THREADS + thread] = make_float4(o[0], o[1], o[2], o[3]);
        }
        if (thread < 32 && lane % 4 == 0)
            for (int h = 0; h < 2; h++) to[ROWS * LATENT + lane / 4 + h * 8] = weight[h];
    }
    // All of `count` parts that lie `stride` parts from each other, this one the `mine`-th; in their order, whichever has
    // come last.
    __device__ void add_up(const float* parts, int count, int stride, int mine) {
        const int thread = threadIdx.x;
        float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0, 0};
        Values all = {};
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const float* const part = parts + i * stride * PART;
            Part next = *this;
            if (i != mine) {
#pragma unroll
                for (int h = 0; h < 2; h++) next.weight[h] = __ldcg(part + ROWS * LATENT + thread % 32 / 4 + h * 8);
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    const float4 y = __ldcg((const float4*)part + n * THREADS + thread);
                    float* const o = next.mean.o[n];
                    o[0] = y.x, o[1] = y.y, o[2] = y.z, o[3] = y.w;
                }
            }
            float old[2], by[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float best = fmaxf(top[h], next.weight[h]);
                old[h] = exp2_approx(top[h] - best), by[h] = exp2_approx(next.weight[h] - best);
                top[h] = best, sum[h] = sum[h] * old[h] + by[h];
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    all.o[n][j] = fmaf(all.o[n][j], old[j / 2], by[j / 2] * next.mean.o[n][j]);
        }
        const float by[2] = {1 / sum[0], 1 / sum[1]};
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) mean.o[n][j] = all.o[n][j] * by[j / 2];
#pragma unroll
        for (int h = 0; h < 2; h++) weight[h] = top[h] + log2f(sum[h]);
    }
};

// AT_ONCE neighbouring parts are added up by the block of them that is the last to be there, then AT_ONCE of these sums, and
// so on. Whether this block has all of the sequence in the end. arrived: as many counts as there may be parts, zero before
// and after: one for each sum, where its first part has its own and, as sums of sums share that, so many behind it.
__device__ inline bool add_up(Part& part, int split, int count, float* parts, int* arrived, int* latest) {
    for (int stride = 1, level = 0; count > 1; stride *= AT_ONCE, level++) {
        const int first = split / AT_ONCE * AT_ONCE, some = min(AT_ONCE, count - first);
        if (some > 1) {
            __syncthreads();  // all have read the weights that are overwritten
            part.store(parts + split * stride * PART);
            __syncthreads();
            if (threadIdx.x == 0) {
                int* const count = arrived + first * stride + level;
                *latest = add_one(count) == some - 1;
                if (*latest) *count = 0;
            }
            __syncthreads();
            if (!*latest) return false;
            part.add_up(parts + first * stride * PART, some, stride, split - first);
        }
        split /= AT_ONCE, count = (count + AT_ONCE - 1) / AT_ONCE;
    }
    return true;
}
