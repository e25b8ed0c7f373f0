// 64 inputs of 8 rows of x, as second operands of two times two matmuls: in the order of formats with BY_RUNS. from: of a
// lane's row, lane / 4, in shared memory, and there its 16 inputs.
__device__ inline void load_runs(unsigned (&first)[4], unsigned (&second)[4], unsigned from) {
    const uint4 low = load_shared16(from), high = load_shared16(from + 16);
    first[0] = low.x, first[1] = high.x, first[2] = low.y, first[3] = high.y;
    second[0] = low.z, second[1] = high.z, second[2] = low.w, second[3] = high.w;
}
