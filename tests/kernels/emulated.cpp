// Runs kernels' libraries of another processor's, under an emulator, for emulated.py: it answers what that asks on the
// standard input. Numbers are int64 in this machine's order.

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Run)(const void* args, int part, int parts);

struct Call {
    Run run;
    const void* args;
};

static void get(void* to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) exit(0);
}
static int64_t number() {
    int64_t x;
    get(&x, sizeof x);
    return x;
}
static void put(int64_t x) { fwrite(&x, sizeof x, 1, stdout); }
static char* bytes(int64_t size, int64_t like = 0) {  // as far behind a multiple of 64 as `like`
    void* room;
    if (posix_memalign(&room, 64, size + 65)) abort();
    char* at = (char*)room + like % 64;
    get(at, size);
    at[size] = 0;
    return at;
}

// Memory of a tensor's.
struct Region {
    int64_t from, size;
    char *here, *before;
};

static void* alone(void* given) {
    Call& call = *(Call*)given;
    call.run(call.args, 0, 1);
    return nullptr;
}

static void run(void* pool_library) {
    auto make = (void* (*)(int))dlsym(pool_library, "pool_make");
    auto pool_run = (void (*)(void*, const Call*, int64_t))dlsym(pool_library, "pool_run");
    static void* pools[64];
    const int64_t threads = number(), together = number(), count = number();
    Region* regions = new Region[count];
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = number(), size = number();
        char* here = bytes(size, from);
        regions[i] = {from, size, here, (char*)memcpy(malloc(size + 1), here, size)};
    }
    const int64_t calls = number();
    Call* list = new Call[calls];
    for (int64_t i = 0; i < calls; i++) {
        list[i].run = (Run)number();
        const int64_t fields = number();
        int64_t* args = (int64_t*)bytes(8 * fields);
        for (int64_t j = 0; j < fields; j++)
            for (int64_t k = 0; k < count; k++)
                if (args[j] >= regions[k].from && args[j] < regions[k].from + regions[k].size) {
                    args[j] += (int64_t)regions[k].here - regions[k].from;
                    break;
                }
        list[i].args = args;
    }
    if (together) {  // each call by a thread of its own
        pthread_t of[16];
        for (int64_t i = 0; i < calls; i++) pthread_create(&of[i], nullptr, alone, list + i);
        for (int64_t i = 0; i < calls; i++) pthread_join(of[i], nullptr);
    } else {
        if (threads > 1 && !pools[threads]) pools[threads] = make(threads);
        pool_run(threads > 1 ? pools[threads] : nullptr, list, calls);
    }
    for (int64_t k = 0; k < count; k++) {
        const bool changed = memcmp(regions[k].here, regions[k].before, regions[k].size) != 0;
        put(changed);
        if (changed) fwrite(regions[k].here, regions[k].size, 1, stdout);
        free(regions[k].before), free(regions[k].here - regions[k].from % 64);
    }
    for (int64_t i = 0; i < calls; i++) free((void*)list[i].args);
    delete[] regions;
    delete[] list;
}

int main() {
    void* pool = nullptr;
    for (;;) {
        const int64_t what = number();
        if (what == 'L') {
            const int64_t size = number();
            void* library = dlopen(bytes(size), RTLD_NOW | RTLD_LOCAL);
            if (!library) fprintf(stderr, "%s\n", dlerror());
            if (library && dlsym(library, "pool_make")) pool = library;
            put((int64_t)library);
        } else if (what == 'S') {
            void* library = (void*)number();
            const int64_t size = number();
            put((int64_t)dlsym(library, bytes(size)));
        } else if (what == 'I') {
            put(*(const int64_t*)number());
        } else {
            run(pool);
        }
        fflush(stdout);
    }
}
