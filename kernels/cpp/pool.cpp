// Runs a list of operations on a few threads: each thread goes through the whole list and does its part of every
// operation; a barrier of all of them stands between two operations. The caller is thread 0, so that one thread needs
// no thread.
//
// A thread that has waited as long as wait.h sets sleeps until it is woken (futex): idle threads cost nothing, and a
// machine with fewer cores than threads still gets on.

#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "op.h"
#include "wait.h"

struct Call {
    Run run;
    const void* args;
};

// A number that grows, and who waits for it. On a cache line of its own.
struct alignas(64) Gate {
    uint32_t value, sleepers;

    void open() {
        // Sequentially consistent, as is wait(): either this sees the sleeper, or the sleeper sees the new value.
        __atomic_add_fetch(&value, 1, __ATOMIC_SEQ_CST);
        wake();
    }

    // Who sleeps looks again as long as before.
    void wake() {
        if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }

    void wait(uint32_t from, int64_t look) {
        for (;;) {
            for (Patience patience(look); !patience.over();)
                if (__atomic_load_n(&value, __ATOMIC_ACQUIRE) != from) return;
            __atomic_add_fetch(&sleepers, 1, __ATOMIC_SEQ_CST);
            syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, from, nullptr, nullptr, 0);
            __atomic_sub_fetch(&sleepers, 1, __ATOMIC_SEQ_CST);
        }
    }
};

struct Pool {
    Gate start, done;  // a list begins; all threads have done their part of an operation
    alignas(64) uint32_t arrived;
    pthread_mutex_t busy;
    int threads;
    const Call* calls;
    int64_t count, look;  // look: nanoseconds that threads look for the next operation or list before they sleep

    int64_t looked() const { return __atomic_load_n(&look, __ATOMIC_RELAXED); }

    void work(int part) {
        const Call* list = calls;  // once the last operation is done, the caller may bring another list
        const int64_t last = count;
        for (int64_t i = 0; i < last; i++) {
            uint32_t before = __atomic_load_n(&done.value, __ATOMIC_ACQUIRE);
            list[i].run(list[i].args, part, threads);
            if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)threads) {
                __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);  // before the gate opens, so before anybody counts
                done.open();
            } else {
                done.wait(before, looked());
            }
        }
    }
};

struct Worker {
    Pool* pool;
    int part;
};

static void* serve(void* given) {
    Worker worker = *(Worker*)given;
    free(given);
    Pool* pool = worker.pool;
    // The first list may have begun before this thread has: it waits from the value that the pool was made with.
    for (uint32_t seen = 0;; seen++) {
        pool->start.wait(seen, pool->looked());
        pool->work(worker.part);
    }
    return nullptr;
}

static void run_alone(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].run(calls[i].args, 0, 1);
}

// A pool that lasts as long as the process. null: the threads cannot be had.
EXPORT void* pool_make(int threads) {
    void* room;
    if (posix_memalign(&room, 64, sizeof(Pool))) return nullptr;
    Pool* pool = (Pool*)memset(room, 0, sizeof(Pool));
    pthread_mutex_init(&pool->busy, nullptr);
    pool->threads = threads;
    pool->look = LOOK_NS;
    for (int part = 1; part < threads; part++) {
        Worker* worker = (Worker*)malloc(sizeof(Worker));
        *worker = {pool, part};
        pthread_t thread;
        if (pthread_create(&thread, nullptr, serve, worker)) return nullptr;  // those that there are sleep for ever
        pthread_detach(thread);
    }
    return pool;
}

// For lists that follow each other at such distances: to wake sleeping threads takes longer than one of them.
// Returns what it was.
EXPORT int64_t pool_look(void* pool, int64_t nanoseconds) {
    return __atomic_exchange_n(&((Pool*)pool)->look, nanoseconds, __ATOMIC_RELAXED);
}

// A list comes soon: threads that sleep look for it from now on.
EXPORT void pool_wake(void* pool) {
    if (pool) ((Pool*)pool)->start.wake();
}

// With a pool that another thread of this process uses, or with none, the caller computes alone.
EXPORT void pool_run(void* given, const Call* calls, int64_t count) {
    Pool* pool = (Pool*)given;
    if (!pool || count == 0 || pthread_mutex_trylock(&pool->busy)) return run_alone(calls, count);
    pool->calls = calls;
    pool->count = count;
    pool->start.open();
    pool->work(0);
    pthread_mutex_unlock(&pool->busy);
}
