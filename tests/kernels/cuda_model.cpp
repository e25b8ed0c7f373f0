// The parts of the model of a GPU's block that are the same for all kernels: its fibers, barriers and copies, and the launch.

#include "cuda_model.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

void run_kernel(void** args);  // of one thread; beside the kernel

namespace model {
constexpr int MOST = 1024, STACK = 64 << 10;
struct Warp {
    int arrived, generation;
    unsigned slots[2][32][8];
};
struct NamedBarrier {
    int arrived, generation;
};
struct Write {  // what the kernel before writes, which has not ended until a block waits for it
    char* to;
    std::vector<char> before, after;
};
struct Running : Fiber {
    ucontext_t context;
    bool done;
    std::function<bool()> ready;  // what it waits for
    std::shared_ptr<int> copying;  // its copies under way that no barrier counts, of the group that may still grow
    std::vector<std::shared_ptr<int>> groups;  // those of older groups
    std::vector<std::vector<std::function<void()>>> gemms;  // groups under way; the last one may still grow
};
struct Block {
    Dim index;
    unsigned char memory[SMEM];  // its shared memory while another block of its cluster runs
    Running fibers[MOST];
    Warp warps[MOST / 32];
    NamedBarrier named_barriers[16];
    std::vector<std::function<void()>> copies;  // under way
    int left;                                   // threads that have not ended
    int slow;                                   // this warp goes on only when no other can
};
Fiber* now;
Dim block, grid, threads;
alignas(1024) unsigned char smem[SMEM];
static ucontext_t scheduler;
static std::vector<std::unique_ptr<Block>> cluster;
static Block* here;  // the block that runs
static NamedBarrier cluster_barrier;
static std::mt19937 draw;
static const char *readable_from, *readable_to, *x_from, *x_to;
static void** arguments;
static const char* failed;  // why, if so
static std::vector<Write> writes;
static bool waited;  // this cluster has

static Running& running() { return *static_cast<Running*>(now); }

void fail(const char* what) {
    failed = what;
    swapcontext(&running().context, &scheduler);
}

void wait_until(std::function<bool()> ready) {
    if (ready()) return;
    running().ready = std::move(ready);
    swapcontext(&running().context, &scheduler);
}

unsigned (*together(const unsigned* mine, int n))[8] {
    Warp& warp = here->warps[now->thread.x / 32];
    const int generation = warp.generation;
    auto slots = warp.slots[generation & 1];
    memcpy(slots[lane()], mine, n * 4);
    if (++warp.arrived == 32) warp.arrived = 0, warp.generation++;
    wait_until([&warp, generation] { return warp.generation != generation; });
    return slots;
}
static void meet(NamedBarrier& barrier, int count, bool waits) {
    const int generation = barrier.generation;
    if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++;
    if (waits) wait_until([&barrier, generation] { return barrier.generation != generation; });
}
void meet(int number, int count, bool waits) { meet(here->named_barriers[number], count, waits); }
const unsigned char* at(unsigned address, int bytes, int rank) {
    const unsigned char* mine = at(address, bytes);
    const Block& other = *cluster[rank];
    if (!other.left) fail("the shared memory of a block that has ended is read");
    return &other == here ? mine : other.memory + address;
}
const char* readable(const void* from, int bytes) {
    const char* p = (const char*)from;
    if (p < readable_from || p + bytes > readable_to) fail("weights are read past their end");
    if ((p - readable_from) % min(bytes, 16)) fail("weights are read where they are not aligned");
    return p;
}

static void settle(Barrier* barrier) {
    if (barrier->pending < 0) fail("more arrivals at a barrier than it has");
    if (!barrier->pending && !barrier->bytes) barrier->pending = barrier->arrivals, barrier->phase++;
}
static void copy(unsigned to, int bytes, std::function<void()> land, Barrier* barrier) {
    at(to + bytes - 16, 16);
    memset(at(to, 16), 0xff, bytes);
    here->copies.push_back([=] {
        land();
        barrier->bytes -= bytes;
        settle(barrier);
    });
}

void wait_for_groups(int left) {
    auto& groups = running().groups;
    for (; groups.size() > left; groups.erase(groups.begin())) {
        auto copying = groups[0];
        wait_until([=] { return !*copying; });
    }
}
void add_gemm(std::function<void()> gemm) { running().gemms.back().push_back(std::move(gemm)); }
void wait_for_gemms(int left) {
    auto& groups = running().gemms;
    for (; groups.size() > left + 1; groups.erase(groups.begin()))
        for (auto& gemm : groups[0]) gemm();
}

static void entry() {
    run_kernel(arguments);
    running().done = true;
    swapcontext(&running().context, &scheduler);
}

static void switch_to(Block& next) {
    if (here) memcpy(here->memory, smem, SMEM);
    memcpy(smem, next.memory, SMEM);
    here = &next, block = next.index;
}

static void begin(Block& one, Dim index, char* stacks) {
    const int count = threads.x;
    one.index = index, one.left = count, one.slow = 0;
    one.copies.clear();
    memset(one.memory, 0xff, SMEM);
    memset(one.warps, 0, sizeof one.warps);
    memset(one.named_barriers, 0, sizeof one.named_barriers);
    for (int i = 0; i < count; i++) {
        Running& fiber = one.fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + (size_t)i * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        fiber.thread = {i, 0, 0}, fiber.done = false, fiber.gemms = {{}}, fiber.copying = std::make_shared<int>(0);
        fiber.groups.clear(), fiber.ready = [] { return true; };
        makecontext(&fiber.context, entry, 0);
    }
}

// Lets all threads of the block that can go on do so, but for a slow warp. Returns whether any has, or a copy came.
static bool pass() {
    bool moved = false;
    auto go = [&](int w) {
        for (int i = w * 32; i < w * 32 + 32; i++) {
            Running& fiber = here->fibers[i];
            if (fiber.done || !fiber.ready()) continue;
            now = &fiber, moved = true;
            swapcontext(&scheduler, &fiber.context);
            if (failed) return;
            here->left -= fiber.done;
        }
    };
    const int all = threads.x / 32, begin = draw() % all;
    for (int w = 0; w < all; w++)
        if ((begin + w) % all != here->slow) go((begin + w) % all);
    auto& copies = here->copies;
    if (!copies.empty() && (!moved || draw() % 4 == 0)) {
        const size_t i = draw() % copies.size();
        const auto land = copies[i];
        copies.erase(copies.begin() + i);
        land();
        moved = true;
    }
    if (!moved) go(here->slow);
    return moved;
}

static void run_cluster(Dim first) {
    static std::unique_ptr<char[]> stacks;  // takes memory where threads have run
    static size_t most;
    const size_t size = cluster.size(), bytes = threads.x * STACK;
    if (most < size * bytes) most = size * bytes, stacks.reset(new char[most]);
    waited = false, here = nullptr, cluster_barrier = {};
    for (const Write& one : writes) memcpy(one.to, one.before.data(), one.before.size());
    for (int i = 0; i < size; i++) begin(*cluster[i], {first.x + i, first.y, 0}, stacks.get() + i * bytes);
    switch_to(*cluster[0]);
    auto left = [] {
        return std::any_of(cluster.begin(), cluster.end(), [](auto& one) { return one->left > 0; });
    };
    for (int passes = 0, still = 0; left(); passes++) {
        if (passes % 50 == 0) here->slow = draw() % (threads.x / 32);
        const bool moved = pass();
        still = moved ? 0 : still + 1;
        if (still == size) failed = "all threads wait for each other";
        if (failed) return;
        if (size > 1 && (!moved || draw() % 16 == 0))
            switch_to(*cluster[moved ? draw() % size : (here->index.x - first.x + 1) % size]);
    }
    for (auto& one : cluster) {
        for (int i = 0; i < threads.x; i++)
            if (one->fibers[i].gemms.size() > 1) failed = "the block ended before its gemms came";
        if (!one->copies.empty()) failed = "the block ended before a copy came";
    }
}
}  // namespace model

using namespace model;

void grid_wait() {
    if (waited) return;
    waited = true;
    for (const auto& one : writes) memcpy(one.to, one.after.data(), one.after.size());
}
int cluster_rank() { return block.x % (int)cluster.size(); }
void cluster_sync() { meet(cluster_barrier, threads.x * cluster.size(), true); }
float4 load_from_block(unsigned from, int rank) {
    float4 y;
    memcpy(&y, at(from, 16, rank), 16);
    return y;
}
void wait_for_count(const int* count, int least) { wait_until([=] { return *count >= least; }); }
void mbarrier_arrive(Barrier* barrier) {
    barrier->pending--;
    settle(barrier);
}
void mbarrier_expect(Barrier* barrier, int bytes) {
    barrier->bytes += bytes;
    mbarrier_arrive(barrier);
}
void mbarrier_wait(Barrier* barrier, int round) {
    wait_until([=] { return (barrier->phase & 1) != (round & 1); });
}
void bulk_load(unsigned to, const void* from, int bytes, Barrier* barrier) {
    if (bytes % 16 || (uintptr_t)from % 16) fail("a bulk copy is not of whole 16 bytes");
    const char* start = (const char*)from;
    if (start < x_from || start + bytes > x_to) readable(start, 16), readable(start + bytes - 16, 16);
    copy(to, bytes, [=] { memcpy(smem + to, start, bytes); }, barrier);
}
void tma_load(unsigned to, const TensorMap* map, int input, int row, Barrier* barrier) {
    if (to % 1024) fail("a swizzled box does not begin at a multiple of 1024");
    const TensorMap box = *map;
    auto land = [=] {
        for (int r = 0; r < box.height; r++)
            for (int c = 0; c < 8; c++) {
                unsigned char* place = smem + to + r * 128 + (c ^ r % 8) * 16;
                memset(place, 0, 16);
                const int first = input + c * 8;
                if (row + r < box.rows && first < box.columns)
                    memcpy(place, box.start + ((size_t)(row + r) * box.columns + first) * 2, 16);
            }
    };
    copy(to, box.height * 128, land, barrier);
}
void tma_load_runs(unsigned to, const TensorMap* map, int run, int row, Barrier* barrier) {
    const TensorMap box = *map;
    const int bytes = box.run * 2, pieces = bytes / 16;  // of a run
    if (to % (bytes * 8)) fail("a swizzled box does not begin where its pieces' order does");
    auto land = [=] {
        for (int i = 0; i < box.height * box.runs * pieces; i++) {
            const int r = i / pieces, c = i % pieces, first = (run + r % box.runs) * box.run + c * 8;
            const unsigned line = (to + r * bytes) / 128;
            unsigned char* place = smem + to + r * bytes + (c ^ line % pieces) * 16;
            memset(place, 0, 16);
            if (row + r / box.runs < box.rows)
                memcpy(place, box.start + ((size_t)(row + r / box.runs) * box.columns + first) * 2, 16);
        }
    };
    copy(to, box.height * box.runs * bytes, land, barrier);
}
void copy_async16(unsigned to, const void* from, bool there) {
    memset(at(to, 16), 0xff, 16);
    auto left = running().copying;
    ++*left;
    const bool read = there && draw() % 2;  // now, or when it lands: memory may change in between
    const uint4 early = read ? *(const uint4*)from : uint4{};
    here->copies.push_back([=] {
        if (there && !read)
            memcpy(smem + to, from, 16);
        else
            memcpy(smem + to, &early, 16);
        --*left;
    });
}
void arrive_when_copied(Barrier* barrier) {
    auto left = running().copying;
    struct Arrival {
        std::shared_ptr<int> left;
        Barrier* barrier;
        void operator()() const {
            if (*left)
                here->copies.push_back(*this);
            else
                mbarrier_arrive(barrier);
        }
    };
    here->copies.push_back(Arrival{left, barrier});
}
void commit_copies() {
    running().groups.push_back(running().copying);
    running().copying = std::make_shared<int>(0);
}
void wgmma_commit() { running().gemms.emplace_back(); }

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void write(char* to, const char* before, const char* after, int bytes) {
    writes.push_back({to, {before, before + bytes}, {after, after + bytes}});
}
EXPORTED const char* launch(const char* from, const char* to, int gx, int gy, int count, int seed, void** args,
                            const char* of_x_from, const char* of_x_to, int any_order, int size) {
    readable_from = from, readable_to = to, draw.seed(seed);
    x_from = of_x_from, x_to = of_x_to;
    grid = {gx, gy, 1}, threads = {count, 1, 1};
    arguments = args, failed = nullptr;
    while (cluster.size() < size) cluster.push_back(std::make_unique<Block>());
    cluster.resize(size);
    std::vector<int> clusters(gx / size * gy);
    std::iota(clusters.begin(), clusters.end(), 0);
    if (any_order) std::shuffle(clusters.begin(), clusters.end(), draw);
    for (int i : clusters) {
        run_cluster({i % (gx / size) * size, i / (gx / size), 0});
        if (failed) break;
    }
    waited = false, grid_wait(), writes.clear();
    return failed;
}
