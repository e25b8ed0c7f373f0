// The rest of a format behind its codes() and scales(), where it has no better one of its own.

// 64 inputs of 8 rows of x, as second operands of two times two matmuls: in the order of formats with BY_RUNS. from: of a
// lane's row, lane / 4, in shared memory, and there its 16 inputs.
__device__ inline void load_runs(unsigned (&first)[4], unsigned (&second)[4], unsigned from) {
    const uint4 low = load_shared16(from), high = load_shared16(from + 16);
    first[0] = low.x, first[1] = high.x, first[2] = low.y, first[3] = high.y;
    second[0] = low.z, second[1] = high.z, second[2] = low.w, second[3] = high.w;
}

template <class P> __device__ inline float2 minima(const P&, int) { return {}; }

// Codes as they are widened the fastest, and what they have too much.
template <class E, class P> __device__ inline void raw_codes(const P& tile, int step, unsigned (&a)[4]) {
    codes<E>(tile, step, a);
}
template <class E, class P> __device__ inline float2 offsets(const P&, int) { return {}; }

// Weights of inputs 16 step to 16 step + 15, rounded once, as the first operand of a matmul.
template <class E, class P> __device__ inline void weights_of(E, const P& tile, int step, unsigned (&a)[4]) {
    codes<E>(tile, step, a);
    const float2 by = scales(tile, step), less = MINIMA ? minima(tile, step) : float2{0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 code = unpack<E>(a[i]);
        const float scale = i % 2 ? by.y : by.x, minimum = i % 2 ? less.y : less.x;
        a[i] = MINIMA ? pack<E>(fmaf(code.x, scale, -minimum), fmaf(code.y, scale, -minimum))
                      : pack<E>(code.x * scale, code.y * scale);
    }
}
template <class E, class P> __device__ inline void weights(const P& tile, int step, unsigned (&a)[4]) {
    weights_of(E(), tile, step, a);
}
