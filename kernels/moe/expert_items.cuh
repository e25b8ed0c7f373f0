// The items that expert_mlp.cu's blocks take, and in which order.

// A GEMM: of an item ROWS_ rows of x, and of a chunk KC_ inputs.
template <bool GATED_, int INPUTS_, int WIDTH_, int ROWS_ = ROWS, int KC_ = KC> struct Gemm {
    static constexpr bool GATED = GATED_, SHARES = ROWS_ == EVERY;
    static constexpr int INPUTS = INPUTS_, WIDTH = WIDTH_, ROWS = ROWS_, KC = KC_, BOXES = KC / 64;
    static constexpr int OUTPUTS = GATED ? 2 * WIDTH : WIDTH, OUTS = GATED ? M / 2 : M;
    static constexpr int BLOCKS = WIDTH / OUTS, CHUNKS = INPUTS / KC;  // of a tile, of an item
};
using Up = Gemm<true, HIDDEN, INNER>;
using Down = Gemm<false, INNER, HIDDEN>;
using SharedUp = Gemm<true, HIDDEN, SHARED, EVERY, 64>;  // a stage has room for so many inputs of all rows
using SharedDown = Gemm<false, SHARED, HIDDEN, EVERY, 64>;
static_assert(!SHARED || (M + EVERY) * 64 * 2 <= STAGE, "a chunk of shared experts is larger than a stage");
static_assert(ROWS < EVERY, "lanes know the rows of an item of routed experts");

#if __CUDA_ARCH__ >= 900
struct Item {
    bool up, shared;
    int tile, expert, block, start, rows;  // shared experts' have neither tile nor expert nor start

    __device__ static Item of_shared(bool up, int block, int tokens) { return {up, true, 0, -1, block, 0, tokens}; }
};

// All is loaded past the first-level cache, which another kernel may have filled before the tiles were there.
struct Tiles {
    const int *ends, *experts, *starts;
    int used, tokens;

    // By a warp, which counts the tiles that are needed.
    __device__ Tiles(const int* ends, const int* experts, const int* starts, int most, int tokens)
        : ends(ends), experts(experts), starts(starts), used(0), tokens(tokens) {
        for (int i = threadIdx.x % 32; i < most; i += 32) used += __ldcg(experts + i) >= 0;
#pragma unroll
        for (int step = 16; step; step >>= 1) used += __shfl_xor_sync(0xffffffffu, used, step);
    }

    __device__ int items() const {
        return used * (Up::BLOCKS + Down::BLOCKS) + (SHARED ? SharedUp::BLOCKS + SharedDown::BLOCKS : 0);
    }
    __device__ Item find(int number) const {
        const int ups = used * Up::BLOCKS;
        if (SHARED) {
            const int first = min((int)gridDim.x, ups);
            if (number >= first && number < first + SharedUp::BLOCKS) return Item::of_shared(true, number - first, tokens);
            if (number >= first) number -= SharedUp::BLOCKS;
            if (number >= ups && number < ups + SharedDown::BLOCKS) return Item::of_shared(false, number - ups, tokens);
            if (number >= ups) number -= SharedDown::BLOCKS;
        }
        Item item;
        item.shared = false;
        item.up = number < ups;
        item.tile = item.up ? number / Up::BLOCKS : (number - ups) / Down::BLOCKS;
        item.block = item.up ? number % Up::BLOCKS : (number - ups) % Down::BLOCKS;
        item.expert = __ldcg(experts + item.tile), item.start = __ldcg(starts + item.tile);
        item.rows = min(ROWS, __ldcg(ends + item.expert + 1) - item.start);
        return item;
    }
};

// The numbers of a block's items, from the thread that asks for weights to the other warps.
struct Queue {
    volatile int* numbers;
    Barrier *posted, *read;

    __device__ void post(int k, int number) const {
        if (k >= TURNS) mbarrier_wait(read + k % TURNS, k / TURNS - 1);
        numbers[k % TURNS] = number;
        mbarrier_arrive(posted + k % TURNS);
    }
    __device__ int get(int k) const {
        mbarrier_wait(posted + k % TURNS, k / TURNS);
        const int number = numbers[k % TURNS];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(read + k % TURNS);
        return number;
    }
};
#endif
