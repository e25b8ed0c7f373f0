// How to wait for another core: look for some tens of microseconds, as it is mostly that close, then give the core away
// a few times, and then sleep. Many yields in a row are bad manners: the scheduler of Linux 6.18 then keeps processes of
// other sessions, the server's too, off the core for seconds (tests/test_idle.py).

#include <sched.h>
#include <stdint.h>
#include <time.h>

constexpr int64_t LOOK_NS = 30000;
constexpr int YIELDS = 4;

class Patience {
    const int64_t look;  // nanoseconds
    int64_t looks = 0, end = 0;
    int yields = 0;

    static int64_t now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000000000 + t.tv_nsec;
    }

public:
    explicit Patience(int64_t nanoseconds = LOOK_NS) : look(nanoseconds) {}

    // Called between two looks: true once it is time to sleep.
    bool over() {
        if (yields == 0) {
            if (++looks % 32 == 0) {
                int64_t time = now();
                if (!end) end = time + look;
                if (time > end) yields = 1;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
            return false;
        }
        if (yields > YIELDS) return true;
        yields++;
        sched_yield();
        return false;
    }
};

// Sleeps as short as Linux makes it, 50 us.
static inline void nap() {
    timespec shortest = {0, 1000};
    nanosleep(&shortest, nullptr);
}
