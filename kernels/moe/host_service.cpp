// The host's part of small-batch steps with a GPU, layer by layer: wait for the layer's tokens and choices, list which
// experts the GPU is to copy, and compute others. A thread of its own does it for whole steps, so that neither side
// waits for Python between two layers.

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "op.h"
#include "wait.h"

constexpr int COPIES = 1, COPIES_TO_STAY = 2;  // as in host_service.py

struct Call {  // as in pool.cpp
    Run run;
    const void* args;
};

struct Layer {
    Run choose;                 // choose_experts of host_experts.cpp
    const void* choose_args;
    const int64_t *found, *copied, *adopted;  // what it finds
    const Call* calls;          // operations that compute experts
    int64_t count;
    // How many of the first ones one thread does sooner than all begin to; and where the CPU has at most `few` routed
    // tokens, how many then, and the last one too.
    int64_t alone, few, before;
    void* made;                 // what they make
    int64_t bytes, copies;      // of that; what copies are for, as in host_service.py
    double *lag, copy;          // seconds, as `choose` has them
};

// The GPU begins to copy when it has computed resident experts, and has to compute what is copied. That is found by
// trying: copies get a longer lag as long as they end after what the CPU computes, and a shorter one as long as they
// end before. Where it leaves none to copy, it becomes shorter slowly, so that they are tried again.
constexpr double LONGER = 0.25, SHORTER = 0.125, SLOWLY = 1.0 / 64, LONGEST = 16;  // of a copy

// State that all layers share. `list`: a word of 23 bits of the layer's count and 9 of how many experts, and then the
// experts, each with its slot + 1 in the upper 16 bits.
struct Shared {
    const uint32_t* sent;  // counts the layers whose tokens are here; behind it, the latest that waited for copies
    uint32_t *made, *list;  // made: counts the layers that are computed, and behind it why no more will be; 0: they will
    void (*run)(void* pool, const Call* calls, int64_t count);
    void (*wake)(void* pool);
    void* pool;
    int64_t *given_up, limit;  // limit: nanoseconds that the thread waits for a layer's tokens
    int64_t* totals;  // nanoseconds of waiting, choosing and computing; experts: resident, computed here, copied, adopted
};

static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

constexpr uint32_t GPU_IS_LATE = 3;  // as in host_service.py
constexpr int64_t LAYER_NS = 300000;  // who waits looks so long, as it is mostly that close, and then sleeps between looks

// The GPU may be a layer ahead.
static bool wait_for(const Shared& s, uint32_t count, int64_t nanoseconds) {
    const int64_t begin = now();
    while ((int32_t)(__atomic_load_n(s.sent, __ATOMIC_ACQUIRE) - count) < 0) {
        const int64_t time = now() - begin;
        if (time > nanoseconds || __atomic_load_n(s.given_up, __ATOMIC_RELAXED)) return false;
        if (time > LAYER_NS) nap();
    }
    return true;
}

static void choose(const Shared& s, const Layer& layer, uint32_t count) {
    layer.choose(layer.choose_args, 0, 1);
    const int64_t copies = layer.found[2];
    for (int64_t i = 0; i < copies; i++)
        s.list[1 + i] = (uint32_t)layer.copied[i] | (uint32_t)(layer.adopted[i] + 1) << 16;
    // Also where no kernel reads it: kernels compare by order, and a count of millions of layers ago would seem to come
    // later.
    __atomic_store_n(s.list, count << 9 | (uint32_t)copies, __ATOMIC_RELEASE);
    const int64_t served = layer.copies == COPIES_TO_STAY ? 0 : copies;  // not those that are computed here, too
    const int64_t more[] = {layer.found[0], layer.found[1], served, layer.found[4]};
    for (int i = 0; i < 4; i++) s.totals[3 + i] += more[i];
}

// Buffers that the layer before, which had this count, has shown.
static void learn(const Shared& s, const Layer& layer, uint32_t count) {
    if (layer.copies != COPIES || !layer.found[1]) return;
    const bool late = __atomic_load_n(s.sent + 1, __ATOMIC_RELAXED) == count;
    const double change = !layer.found[2] ? -SLOWLY : late ? LONGER : -SHORTER;
    const double lag = *layer.lag + change * layer.copy, most = LONGEST * layer.copy;
    *layer.lag = lag < 0 ? 0 : lag > most ? most : lag;
}

static void compute(const Shared& s, const Layer& layer, uint32_t count) {
    if (layer.found[1]) {
        const bool few = layer.found[3] <= layer.few;
        const int64_t first = few ? layer.before : layer.alone, last = few ? layer.count - 1 : layer.count;
        for (int64_t i = 0; i < first; i++) layer.calls[i].run(layer.calls[i].args, 0, 1);
        s.run(s.pool, layer.calls + first, last - first);
        for (int64_t i = last; i < layer.count; i++) layer.calls[i].run(layer.calls[i].args, 0, 1);
    } else {
        memset(layer.made, 0, layer.bytes);
    }
    __atomic_store_n(s.made, count, __ATOMIC_RELEASE);
}

// 0: its tokens have not come after so long.
EXPORT int service_choose(const Shared* s, const Layer* layer, uint32_t count, int64_t nanoseconds) {
    if (!wait_for(*s, count, nanoseconds)) return 0;
    choose(*s, *layer, count);
    return 1;
}

constexpr int STEPS = 8;  // that may wait

struct Step {
    const Layer* layers;
    int64_t count;
    uint32_t first;  // the first layer's count
    int chosen;      // whether service_choose was called already
};

static void serve(const Shared& s, const Step& step) {
    for (int64_t i = 0; i < step.count; i++) {
        const uint32_t count = step.first + (uint32_t)i;
        const int64_t begin = now();
        if (!step.chosen && !wait_for(s, count, s.limit)) {
            if (!__atomic_exchange_n(s.given_up, 1, __ATOMIC_ACQ_REL))
                __atomic_store_n(s.made + 1, GPU_IS_LATE, __ATOMIC_RELEASE);
            return;
        }
        const int64_t here = now();
        if (!step.chosen && i) learn(s, step.layers[i - 1], count - 1);
        if (!step.chosen) choose(s, step.layers[i], count);
        const int64_t chosen = now();
        compute(s, step.layers[i], count);
        s.totals[0] += here - begin, s.totals[1] += chosen - here, s.totals[2] += now() - chosen;
    }
}

struct Service {
    const Shared* shared;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    Step steps[STEPS];
    uint64_t posted, done;  // steps
};

static void* work(void* given) {
    Service& a = *(Service*)given;
    const int64_t& computed = a.shared->totals[4];
    for (int64_t had = 0;;) {  // had: experts that the step before computed here
        for (Patience patience; __atomic_load_n(&a.posted, __ATOMIC_ACQUIRE) == a.done && !patience.over();) {}
        pthread_mutex_lock(&a.mutex);
        while (a.posted == a.done) pthread_cond_wait(&a.changed, &a.mutex);
        const Step step = a.steps[a.done % STEPS];
        pthread_mutex_unlock(&a.mutex);
        if (!step.layers) break;
        if (had && !step.chosen) a.shared->wake(a.shared->pool);  // while the first layer's tokens are on their way
        const int64_t before = computed;
        serve(*a.shared, step);
        had = computed - before;  // not after what follows: who ends this thread waits for that, and frees the totals
        pthread_mutex_lock(&a.mutex);
        __atomic_store_n(&a.done, a.done + 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&a.changed);
        pthread_mutex_unlock(&a.mutex);
    }
    free(given);
    return nullptr;
}

// null: no thread can be had.
EXPORT void* service_make(const Shared* shared) {
    Service* a = (Service*)calloc(1, sizeof(Service));
    if (!a) return nullptr;
    a->shared = shared;
    pthread_mutex_init(&a->mutex, nullptr);
    pthread_cond_init(&a->changed, nullptr);
    pthread_t thread;
    if (pthread_create(&thread, nullptr, work, a)) return nullptr;
    pthread_detach(thread);
    return a;
}

// Serve these layers once what was posted before is done. Waits where STEPS wait already. layers null: end the thread.
EXPORT void service_post(void* given, const Layer* layers, int64_t count, uint32_t first, int chosen) {
    Service& a = *(Service*)given;
    pthread_mutex_lock(&a.mutex);
    while (a.posted - a.done == STEPS) pthread_cond_wait(&a.changed, &a.mutex);
    a.steps[a.posted % STEPS] = {layers, count, first, chosen};
    __atomic_store_n(&a.posted, a.posted + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&a.changed);
    pthread_mutex_unlock(&a.mutex);
}

// 1 once all that was posted is done, 0 if it is not after so long.
EXPORT int service_drain(void* given, int64_t nanoseconds) {
    Service& a = *(Service*)given;
    const int64_t begin = now();
    while (__atomic_load_n(&a.posted, __ATOMIC_ACQUIRE) != __atomic_load_n(&a.done, __ATOMIC_ACQUIRE)) {
        const int64_t time = now() - begin;
        if (time > nanoseconds) return 0;
        if (time > LAYER_NS) nap();
    }
    return 1;
}
