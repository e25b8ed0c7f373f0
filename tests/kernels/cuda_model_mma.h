// half2.cuh and mma.cuh in the model of a GPU's block. Included by cuda_model.h.

#define MINUS_INFINITY (-INFINITY)
#define LOG2_E 1.4426950408889634f
static unsigned and_xor(unsigned x, unsigned mask, unsigned with) { return x & mask ^ with; }
static unsigned chosen_bits(unsigned x, unsigned y, unsigned mask) { return x & mask | y & ~mask; }
template <class E> static unsigned pack(float a, float b) {
    return from_float<E>(a).bits | (unsigned)from_float<E>(b).bits << 16;
}
template <class E> static unsigned add2(unsigned a, unsigned b) {
    const float2 x = unpack<E>(a), y = unpack<E>(b);
    return pack<E>(x.x + y.x, x.y + y.y);
}
template <class E> static unsigned mul2(unsigned a, unsigned b) {
    const float2 x = unpack<E>(a), y = unpack<E>(b);
    return pack<E>(x.x * y.x, x.y * y.y);
}
template <class E> static unsigned fma2(unsigned a, unsigned b, unsigned c) {
    const float2 x = unpack<E>(a), y = unpack<E>(b), z = unpack<E>(c);
    return pack<E>(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
static unsigned e4m3_of(float x) {
    const unsigned sign = __float_as_uint(x) >> 31 << 7;
    const float size = fabsf(x);
    if (std::isnan(x)) return 0x7f;
    if (size >= 448) return sign | 0x7e;
    int exponent;
    frexpf(size, &exponent);
    if (size == 0 || exponent < -5) exponent = -5;
    return sign | ((exponent + 6) * 8 + (int)nearbyintf(ldexpf(size, 4 - exponent)) - 8);  // 8 to 16 of 8, less at the least
}
static unsigned to_e4m3x2(float first, float second) { return e4m3_of(first) | e4m3_of(second) << 8; }
static float number_of_e4m3(unsigned code) {
    if ((code & 0x7f) == 0x7f) return NAN;
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return code & 0x80 ? -size : size;
}
static void e4m3x4_to_f16(unsigned codes, unsigned& low, unsigned& high) {
    const auto number = [&](int i) { return number_of_e4m3(codes >> 8 * i & 255); };
    low = pack<f16>(number(0), number(1)), high = pack<f16>(number(2), number(3));
}
static void ldmatrix(unsigned (&y)[4], unsigned from) {
    auto slots = model::together(&from, 1);
    const int lane = model::lane();
    for (int i = 0; i < 4; i++) memcpy(y + i, model::at(slots[i * 8 + lane / 4][0], 16) + lane % 4 * 4, 4);
}
static void ldmatrix_transposed(unsigned (&y)[4], unsigned from) {
    auto slots = model::together(&from, 1);
    const int lane = model::lane();
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++)
            memcpy((char*)(y + i) + h * 2, model::at(slots[i * 8 + lane % 4 * 2 + h][0], 16) + lane / 4 * 2, 2);
}
static void ldmatrix(unsigned (&y)[2], unsigned from) {
    auto slots = model::together(&from, 1);
    const int lane = model::lane();
    for (int i = 0; i < 2; i++) memcpy(y + i, model::at(slots[i * 8 + lane / 4][0], 16) + lane % 4 * 4, 4);
}
template <class E> static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto slots = model::together(mine, 6);
    const int lane = model::lane();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const unsigned x = slots[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], y = slots[column * 4 + k % 8 / 2][4 + k / 8];
            sum += (double)to_float(half_of<E>(x, k % 2)) * to_float(half_of<E>(y, k % 2));
        }
        c[i] = (float)sum;
    }
}
template <bool HAS_SOFTCAP> static float score(float dot, float scale, float softcap) {
    const float c = softcap * LOG2_E;
    return HAS_SOFTCAP ? c * tanhf(dot * (scale / c)) : dot * scale;
}
static void exchange_quads(unsigned (&x)[4]) {
    auto slots = model::together(x, 4);
    const int lane = model::lane();
    for (int i = 0; i < 4; i++) x[i] = slots[lane / 4 * 4 + i][lane % 4];
}
