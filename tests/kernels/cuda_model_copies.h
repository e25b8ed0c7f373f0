// tma.cuh and async_copy.cuh in the model: copies that threads make on their own, and what clusters of one block need. Included by
// cuda_model.h.

void copy_async16(unsigned to, const void* from, bool there);
static void prefetch_bulk(const void* from, int bytes) {
    if (bytes % 16 || (uintptr_t)from % 16) model::fail("a bulk prefetch is not of whole 16 bytes");
}
void arrive_when_copied(Barrier* barrier);
void commit_copies();
namespace model {
void wait_for_groups(int left);
}
template <int GROUPS> static void wait_for_groups() { model::wait_for_groups(GROUPS); }
static void wait_for_copies() {
    commit_copies();
    wait_for_groups<0>();
}

// Blocks of a cluster. They have their own dynamic shared memory and, in the model, other shared variables in common.
int cluster_rank();
void cluster_sync();
float4 load_from_block(unsigned from, int rank);
static void mbarrier_arrive_at_if(bool, Barrier*, int) { model::fail("the model's clusters share no barriers"); }
static void tma_load_multicast(unsigned, const TensorMap*, int, int, Barrier*, int = 3) {
    model::fail("the model's clusters share no copies");
}
static void bulk_load_multicast(unsigned, const void*, int, Barrier*, int) {
    model::fail("the model's clusters share no copies");
}
