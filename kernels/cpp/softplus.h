// log(1 + e^x) of one number, for recurrent layers' time steps. Included behind simd.h.

INLINE float exp(float x) { return exp(fill(x))[0]; }

// log(1 + t), t >= 0: 2 atanh of t / (2 + t), by its series where that is small; else of what is left of a power of
// two.
INLINE float log1p(float t) {
    float whole = 0;
    if (t > 0.4f) {
        float y = t + 1;
        uint32_t bits;
        memcpy(&bits, &y, 4);
        int32_t power = (int32_t)((bits + 0x004afb0d) >> 23) - 127;  // what is left is between sqrt(1/2) and sqrt(2)
        bits -= (uint32_t)power << 23;
        memcpy(&y, &bits, 4);
        whole = power * 0.69314718f, t = y - 1;
    }
    float s = t / (2 + t), z = s * s;
    return whole + 2 * s * (1 + z * (1.f / 3 + z * (1.f / 5 + z * (1.f / 7 + z * (1.f / 9)))));
}

// log(1 + exp(x)), with torch's threshold.
INLINE float softplus(float x) { return x > 20 ? x : log1p(exp(x)); }
