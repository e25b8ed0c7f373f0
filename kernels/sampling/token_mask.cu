// -inf for x[at[r], c] where bit offset + c of bits[r] is 0; x [S, width], `stride` elements from row to row, bits
// [R, words]. One masked row per blockIdx.y. Nothing is read of x, and only what is forbidden is written.

extern "C" __global__ void __launch_bounds__(256)
token_mask(T* x, int stride, int width, const int* at, const unsigned* bits, int words, int offset) {
    launch_dependents();
    grid_wait();
    const unsigned* allowed = bits + (long long)blockIdx.y * words;
    T* row = x + (long long)at[blockIdx.y] * stride;
    const T never = from_float<T>(__uint_as_float(0xff800000u));
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const int column = (blockIdx.x * COLUMNS + j) * blockDim.x + threadIdx.x;
        const int token = offset + column;
        if (column < width && token / 32 < words && !(allowed[token / 32] >> token % 32 & 1)) row[column] = never;
    }
}
