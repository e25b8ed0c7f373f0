// Of tma.cuh: copies that threads make on their own, and what clusters of one block need. Included by cuda_model.h.

static void copy_async16(unsigned to, const void* from, bool there) {
    memset(model::at(to, 16), 0xff, 16);
    auto left = model::now->copying;
    ++*left;
    model::copies.push_back([=] {
        if (there)
            memcpy(model::smem + to, from, 16);
        else
            memset(model::smem + to, 0, 16);
        --*left;
    });
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
static void wait_for_copies() {
    auto left = model::now->copying;
    model::wait_until([=] { return !*left; });
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
