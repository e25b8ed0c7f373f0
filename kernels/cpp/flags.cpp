// Flags in memory that this process and a device share.

#include <stdint.h>
#include <time.h>

#include "op.h"
#include "wait.h"

// 1 once the flag has the value, 0 if it has not after so many nanoseconds. Looks for a layer's time, as it is mostly
// that close, and then sleeps between two looks.
EXPORT int flag_wait(const uint32_t* flag, uint32_t value, int64_t nanoseconds) {
    constexpr int64_t LAYER_NS = 300000;
    int64_t begin = 0;
    for (int64_t looks = 0;; looks++) {
        if (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == value) return 1;
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        const int64_t time = t.tv_sec * 1000000000 + t.tv_nsec;
        if (!looks) begin = time;
        if (time - begin > nanoseconds) return 0;
        if (time - begin > LAYER_NS) nap();
    }
}

EXPORT void flag_set(uint32_t* flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
