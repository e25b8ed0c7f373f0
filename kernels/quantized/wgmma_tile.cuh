// Parts shared by kernels of Hopper's asynchronous matmuls: a block's tile of M outputs, whose sums [ROWS, M] f32 lie in shared
// memory with a pitch of PITCH, and how they are stored as y [rows, width].
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int BAND = 16;

struct Tile {
    int first, row, rank;  // output of y, row, part of the inputs

    // This block's of a cluster's tiles `at`: neighbours share W, and BAND runs of rows take all columns before others
    // do, so that the second-level cache has their x. columns: runs of OUTS outputs.
    __device__ Tile(int at, int row_tiles, int columns, int height) {
        const int runs = (row_tiles + OVER - 1) / OVER, band = at / (BAND * columns) * BAND;
        const int here = min(BAND, runs - band), rest = at - band * columns;
        first = (unsigned)(rest / here) * OUTS;
        row = ((band + rest % here) * OVER + blockIdx.x % OVER) * height, rank = blockIdx.x % SPLIT;
    }
};

// Four values of the sums, over the cluster's blocks.
__device__ inline float4 total(const float* at) {
    if constexpr (SPLIT == 1) return *(const float4*)at;
    float4 sum = {};
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
        const float4 part = load_from_block(smem_address(at), rank);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    return sum;
}

// Four values of a row of y, from a column on.
__device__ inline void store_four(const float4& sum, const float4& up, const T* bias, T* y, int column, int width) {
    const float of_gate[] = {sum.x, sum.y, sum.z, sum.w}, of_up[] = {up.x, up.y, up.z, up.w};
    const int count = min(width - column, 4);
    Vec<T, 4> four;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        auto added = [&](int at) { return BIAS && j < count ? to_float(bias[at + j]) : 0; };
        const float value = of_gate[j] + added(column);
        four.x[j] = from_float<T>(GATED ? gated<T, ACT>(value, of_up[j] + added(width + column)) : value);
    }
    if (width % 4 == 0) {
        *(Vec<T, 4>*)(y + column) = four;
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < count) y[column + j] = four.x[j];
    }
}

// This block's outputs of the tile: of y's rows from its first on, `rows` of them.
__device__ inline void store(const float* sums, const T* bias, T* y, const Tile& tile, int width, int rows) {
    constexpr int MINE = OUTS / SPLIT, FOURS = MINE / 4, AT_ONCE = 4;  // fours that a thread reads before it goes on
    for (int first = threadIdx.x; first < rows * FOURS; first += AT_ONCE * THREADS) {
        float4 sum[AT_ONCE], up[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = min(first + k * THREADS, rows * FOURS - 1);
            const float* const at = sums + i / FOURS * PITCH + tile.rank * MINE + i % FOURS * 4;
            sum[k] = total(at), up[k] = GATED ? total(at + OUTS) : sum[k];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = first + k * THREADS, column = tile.first + tile.rank * MINE + i % FOURS * 4;
            if (i < rows * FOURS && column < width)
                store_four(sum[k], up[k], bias, y + (long long)(tile.row + i / FOURS) * width, column, width);
        }
    }
}
#endif
