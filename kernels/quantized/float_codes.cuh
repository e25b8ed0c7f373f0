// Parts shared by formats whose codes are floating-point numbers, with scales alone.

// Codes as raw_mma.cuh takes them: no faster way to widen them leaves anything to take off.
constexpr bool RAW = false;
constexpr int TOGETHER = 1;
template <class E> __device__ inline void raw_codes(const PackedTile& tile, int step, unsigned (&a)[4]) { codes<E>(tile, step, a); }
template <class E> __device__ inline float2 offsets(const PackedTile&, int) { return {}; }

// Weights of inputs 16 step to 16 step + 15, rounded once, as the first operand of a matmul.
template <class E> __device__ inline void weights(const PackedTile& tile, int step, unsigned (&a)[4]) {
    const float2 by = scales(tile, step);
    codes<E>(tile, step, a);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 code = unpack<E>(a[i]);
        const float scale = i % 2 ? by.y : by.x;
        a[i] = pack<E>(code.x * scale, code.y * scale);
    }
}
