// Of tma.cuh and async_copy.cuh: copies that threads make on their own, and what clusters of one block need. Included by
// cuda_model.h.

static void copy_async16(unsigned to, const void* from, bool there) {
    memset(model::at(to, 16), 0xff, 16);
    auto left = model::now->copying;
    ++*left;
    const bool read = there && model::draw() % 2;  // now, or when it lands: memory may change in between
    const uint4 early = read ? *(const uint4*)from : uint4{};
    model::copies.push_back([=] {
        if (there && !read)
            memcpy(model::smem + to, from, 16);
        else
            memcpy(model::smem + to, &early, 16);
        --*left;
    });
}
static void prefetch_bulk(const void* from, int bytes) {
    if (bytes % 16 || (uintptr_t)from % 16) model::fail("a bulk prefetch is not of whole 16 bytes");
}
static void arrive_when_copied(Barrier* barrier) {
    auto left = model::now->copying;
    struct Arrival {
        std::shared_ptr<int> left;
        Barrier* barrier;
        void operator()() const {
            if (*left)
                model::copies.push_back(*this);
            else
                mbarrier_arrive(barrier);
        }
    };
    model::copies.push_back(Arrival{left, barrier});
}
static void commit_copies() {
    model::now->groups.push_back(model::now->copying);
    model::now->copying = std::make_shared<int>(0);
}
template <int GROUPS> static void wait_for_groups() {
    auto& groups = model::now->groups;
    for (; groups.size() > GROUPS; groups.erase(groups.begin())) {
        auto left = groups[0];
        model::wait_until([=] { return !*left; });
    }
}
static void wait_for_copies() {
    commit_copies();
    wait_for_groups<0>();
}

// What clusters of one block need.
static int cluster_rank() { return 0; }
static void cluster_sync() { model::fail("the model has no clusters"); }
static void mbarrier_arrive_at_if(bool, Barrier*, int) { model::fail("the model has no clusters"); }
static void tma_load_multicast(unsigned, const TensorMap*, int, int, Barrier*, int = 3) { model::fail("the model has no clusters"); }
static void bulk_load_multicast(unsigned, const void*, int, Barrier*, int) {
    model::fail("the model has no clusters");
}
static float4 load_from_block(unsigned, int) {
    model::fail("the model has no clusters");
    return {};
}
