// An operation: a function of a plain struct of arguments that every thread of the pool calls, each for its part.
//
//     struct Add { const float *x, *y; float* sum; int64_t count; };
//     template <typename T> void add(const Add& a, int part, int parts) { ... }
//     OP(add_f32, add<float>, Add)
//
// All fields have eight bytes: pointers, int64_t, double, in the order in which Python gives them (ops.py), which asks
// NAME_fields how many there are. What one operation writes another may read, as a barrier of all threads is in between
// (pool.cpp); threads of one operation must not.

#include <stdint.h>

typedef void (*Run)(const void* args, int part, int parts);

#define EXPORT extern "C" __attribute__((visibility("default")))

#define OP(name, function, Args)                                                 \
    EXPORT void name(const void* args, int part, int parts) {                    \
        function(*(const Args*)args, part, parts);                               \
    }                                                                            \
    EXPORT const int64_t name##_fields = sizeof(Args) / 8;

// NAME_f32 and NAME_bf16 of a template for the type that it computes with.
#define TYPED_OP(name, function, Args)         \
    OP(name##_f32, function<float>, Args)      \
    OP(name##_bf16, function<bf16>, Args)

// Items first..last - 1 of `count` are this thread's.
struct Share {
    int64_t first, last;
    Share(int64_t count, int part, int parts) : first(count * part / parts), last(count * (part + 1) / parts) {}
};
