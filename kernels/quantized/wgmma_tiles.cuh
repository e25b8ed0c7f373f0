// Parts shared by Hopper kernels of asynchronous 16-bit matmuls that make the first operand, the weights, in registers
// from packed tiles in shared memory, chunk by chunk of KC inputs.

// Weights of inputs 16 step to 16 step + 15. An f16 holds not every scale, so there each weight is rounded once. In
// bf16 scales and minima are rounded, too: to multiply pairs takes less than half as many instructions.
template <class E> __device__ inline void scaled_codes(const PackedTile& tile, int step, unsigned (&a)[4]) {
    weights<E>(tile, step, a);
}
template <> __device__ inline void scaled_codes<bf16>(const PackedTile& tile, int step, unsigned (&a)[4]) {
    codes<bf16>(tile, step, a);
    const float2 by = scales(tile, step), less = minima(tile, step);
    const unsigned scale[2] = {pack<bf16>(by.x, by.x), pack<bf16>(by.y, by.y)};
    const unsigned minus[2] = {pack<bf16>(-less.x, -less.x), pack<bf16>(-less.y, -less.y)};
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = MINIMA ? fma2<bf16>(a[i], scale[i % 2], minus[i % 2]) : mul2<bf16>(a[i], scale[i % 2]);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Has tensor cores multiply a chunk of x, which lies in boxes of 64 inputs, by OF_WARP n-tiles of 16 outputs for each
// warp, which lie behind it, each OF_CHUNK packed tiles: the last matmuls are under way at the end. sum: of outputs
// lane / 4 of an n-tile and 8 below, pairs of rows lane % 4 * 2 of each eight. add: whether to what they hold. a: of 32
// inputs of an n-tile each: the matmuls of some are under way while the others' weights are made. release() is called
// once those of the chunk before have ended.
template <int OF_WARP, class Release>
__device__ __forceinline__ void multiply_chunk(unsigned stage, int warp, int lane, bool add, unsigned (&a)[2][2][4],
                                               float (&sum)[OF_WARP][ROWS / 2], const Release& release) {
    constexpr int PARTS = SPAN / 32;  // of 32 inputs of a packed tile
    const unsigned long long of_x = smem_descriptor(stage, 16);
    auto fetch = [&](int q) {  // packed tiles of the same inputs one after the other
        const int n_tile = warp * OF_WARP + q % OF_WARP;
        return load_packed_tile(stage + X_BYTES + (n_tile * OF_CHUNK + q / OF_WARP) * PACKED_BYTES, lane);
    };
    PackedTile next = fetch(0);
#pragma unroll
    for (int q = 0; q < OF_CHUNK * OF_WARP; q++) {
        const PackedTile tile = next;
#pragma unroll
        for (int h = 0; h < PARTS; h++) {
            const int k = q / OF_WARP * PARTS + h, set = (q * PARTS + h) % 2;  // k: of the chunk's parts of 32 inputs
            scaled_codes<T>(tile, 2 * h, a[set][0]);
            scaled_codes<T>(tile, 2 * h + 1, a[set][1]);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const int at = k / 2 * ROWS * 128 + k % 2 * 64 + s * 32;
                wgmma<false>(T(), sum[q % OF_WARP], a[set][s], descriptor_at(of_x, at), add || k > 0 || s > 0);
            }
            wgmma_commit();
            if (h == PARTS - 1 && q + 1 < OF_CHUNK * OF_WARP) next = fetch(q + 1);
            wgmma_wait<1>();
            if (q + h == 0) release();
        }
    }
}
#endif
