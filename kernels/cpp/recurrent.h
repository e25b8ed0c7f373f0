// Parts of recurrent layers: log(1 + e^x) of one number, for time steps, and the walk over states. Included behind
// op.h and simd.h.

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

// token(index, head, before, state) makes of the state before a token its own, of sequences that decode: for each of
// `heads` heads, which have `size` numbers of a state and `dim` of an output. a: a step with rings of states, as
// gated_delta.py explains.
template <typename T, typename Step, typename Token>
INLINE void walk_states(const Step& a, int64_t heads, int64_t size, int64_t dim, int part, int parts, Token token) {
    Share share(a.sequences * heads, part, parts);
    for (int64_t i = share.first; i < share.last; i++) {
        int64_t sequence = i / heads, head = i % heads, first = sequence * a.query_len;
        if (a.rows[sequence] < 0) {
            for (int64_t j = 0; j < a.query_len; j++)
                memset((T*)a.out + ((first + j) * heads + head) * dim, 0, dim * sizeof(T));
            continue;
        }
        int64_t position = a.lengths[sequence] - a.query_len;  // of the first token
        auto entry = [&](int64_t position) {
            return a.state + ((a.rows[sequence] * a.entries + position % a.entries) * heads + head) * size;
        };
        const float* before = position > 0 ? entry(position - 1) : entry(0);
        if (position <= 0) memset(entry(0), 0, size * sizeof(float));
        for (int64_t j = 0; j < a.query_len; j++) {
            float* state = entry(position + j);
            token(first + j, head, before, state);
            before = state;
        }
    }
}
