// What wgmma.cuh does, in the model of a GPU's block: Hopper's asynchronous GEMMs of tiles.

static unsigned long long smem_descriptor(unsigned start, int) {
    if (start % 1024 / 128 || start % 32) model::fail("an operand does not begin in the first row of a swizzled box");
    return start;
}
static unsigned long long descriptor_at(unsigned long long descriptor, int bytes) {
    return smem_descriptor((unsigned)descriptor + bytes, 16);
}
static void wgmma_fence() {}
static void wgmma_commit() { model::now->gemms.emplace_back(); }
template <int N> static void wgmma_wait() {
    auto& groups = model::now->gemms;
    for (; groups.size() > N + 1; groups.erase(groups.begin()))
        for (auto& gemm : groups[0]) gemm();
}
template <int N> static void fence_registers(float (&)[N]) {}
template <int N> static void set_registers(bool) {}
// c and a are read when it takes place: what is overwritten before shows.
template <bool ACROSS, class E, int N>
static void wgmma(E, float (&c)[N], const unsigned (&a)[4], unsigned long long b, bool add) {
    static_assert(!ACROSS);
    float* const sums = c;
    const unsigned* const rows = a;
    model::now->gemms.back().push_back([=] {
        auto slots = model::together(rows, 4);
        const int lane = model::lane();
        float x[2][16];
        for (int h = 0; h < 2; h++)
            for (int k = 0; k < 16; k++) x[h][k] = to_float(half_of<E>(slots[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k % 2));
        for (int r = 0; r < N; r++) {
            const int column = r / 4 * 8 + lane % 4 * 2 + r % 2;
            double sum = add ? sums[r] : 0;
            for (int k = 0; k < 16; k++) {
                const unsigned at = (unsigned)b + column * 128 + k * 2;
                E y;
                memcpy(&y, model::at(at ^ (at >> 7 & 7) << 4, 2), 2);
                sum += (double)x[r / 2 % 2][k] * to_float(y);
            }
            sums[r] = (float)sum;
        }
    });
}
