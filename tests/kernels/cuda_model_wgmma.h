// wgmma.cuh in the model of a GPU's block: Hopper's asynchronous GEMMs of tiles.

// The operand's start, and above it how far its runs of 64 columns are apart.
static unsigned long long smem_descriptor(unsigned start, int apart) {
    if (start % 1024 / 128 || start % 32) model::fail("an operand does not begin in the first row of a swizzled box");
    return (unsigned long long)apart << 32 | start;
}
static unsigned long long descriptor_at(unsigned long long descriptor, int bytes) {
    return smem_descriptor((unsigned)descriptor + bytes, descriptor >> 32);
}
static void wgmma_fence() {}
void wgmma_commit();
namespace model {
void add_gemm(std::function<void()> gemm);
void wait_for_gemms(int left);
}  // namespace model
template <int N> static void wgmma_wait() { model::wait_for_gemms(N); }
template <int N> static void fence_registers(float (&)[N]) {}
template <int N> static void set_registers(bool) {}
// c and a are read when it takes place: what is overwritten before shows.
template <bool ACROSS, class E, int N>
static void wgmma(E, float (&c)[N], const unsigned (&a)[4], unsigned long long b, bool add) {
    float* const sums = c;
    const unsigned* const rows = a;
    model::add_gemm([=] {
        auto slots = model::together(rows, 4);
        const int lane = model::lane();
        float x[2][16];
        for (int h = 0; h < 2; h++)
            for (int k = 0; k < 16; k++) x[h][k] = to_float(half_of<E>(slots[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k % 2));
        for (int r = 0; r < N; r++) {
            const int column = r / 4 * 8 + lane % 4 * 2 + r % 2;
            double sum = add ? sums[r] : 0;
            for (int k = 0; k < 16; k++) {
                const unsigned across = k * 128 + column / 64 * (unsigned)(b >> 32) + column % 64 * 2;
                const unsigned at = (unsigned)b + (ACROSS ? across : column * 128 + k * 2);
                E y;
                memcpy(&y, model::at(at ^ (at >> 7 & 7) << 4, 2), 2);
                sum += (double)x[r / 2 % 2][k] * to_float(y);
            }
            sums[r] = (float)sum;
        }
    });
}

// Multiplies with a in shared memory, too.
template <class E, int N> static void wgmma(E, float (&c)[N], unsigned long long a, unsigned long long b, bool add) {
    float* const sums = c;
    const int first = model::now->thread.x % 128 / 32 * 16 + model::lane() / 4, second = model::lane() % 4 * 2;
    model::add_gemm([=] {
        auto element = [](unsigned at) {
            E y;
            memcpy(&y, model::at(at ^ (at >> 7 & 7) << 4, 2), 2);
            return (double)to_float(y);
        };
        for (int r = 0; r < N; r++) {
            const int row = first + r / 2 % 2 * 8, column = second + r / 4 * 8 + r % 2;
            double sum = add ? sums[r] : 0;
            for (int k = 0; k < 16; k++)
                sum += element((unsigned)a + row * 128 + k * 2) * element((unsigned)b + column * 128 + k * 2);
            sums[r] = (float)sum;
        }
    });
}

// An operand without swizzling: where it begins, and how far its tiles of 8 rows of 16 bytes are apart.
static unsigned long long plain_descriptor(unsigned start, int leading, int stride) {
    if (start % 16 || leading % 16 || stride % 16) model::fail("an operand is not of whole 16 bytes");
    return start | (unsigned long long)leading << 20 | (unsigned long long)stride << 40;
}
static float of_e4m3(unsigned char x) {
    const int exponent = x >> 3 & 15, fraction = x & 7;
    const float value = (x & 127) == 127 ? NAN : exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    return x & 128 ? -value : value;
}
// c [64, 2 N] = or += a [64, 32] b [2 N, 32] of e4m3, a without swizzling and b with it.
template <int N> static void wgmma_e4m3(float (&c)[N], unsigned long long a, unsigned long long b, bool add) {
    float* const sums = c;
    const int first = model::now->thread.x % 128 / 32 * 16 + model::lane() / 4, second = model::lane() % 4 * 2;
    model::add_gemm([=] {
        for (int r = 0; r < N; r++) {
            const int row = first + r / 2 % 2 * 8, column = second + r / 4 * 8 + r % 2;
            double sum = add ? sums[r] : 0;
            for (int k = 0; k < 32; k++) {
                const unsigned of_a = (a & 0xfffff) + k / 16 * (a >> 20 & 0xfffff) + row / 8 * (a >> 40) + row % 8 * 16 + k % 16;
                const unsigned of_b = (unsigned)b + column * 128 + k;
                sum += (double)of_e4m3(*model::at(of_a, 1)) * of_e4m3(*model::at(of_b ^ (of_b >> 7 & 7) << 4, 1));
            }
            sums[r] = (float)sum;
        }
    });
}

// Exchanges values between a warp's lanes.
static unsigned transpose_8x8(unsigned x) {
    auto slots = model::together(&x, 1);
    const int lane = model::lane(), half = lane / 4 % 2;
    const unsigned first = slots[lane % 4 * 8 + lane / 8][0], second = slots[lane % 4 * 8 + 4 + lane / 8][0];
    return (first >> 16 * half & 0xffff) | (second >> 16 * half & 0xffff) << 16;
}
static void swap_lanes(unsigned& a, unsigned& b, int bit) {
    const bool upper = model::lane() & bit;
    const unsigned mine = upper ? a : b;
    (upper ? a : b) = model::together(&mine, 1)[model::lane() ^ bit][0];
}
