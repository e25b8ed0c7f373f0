// The tiles of a grouped GEMM: up to ROWS routed tokens of one expert, in the order of group.cu, and OUTS of the WIDTH
// outputs of y, or as many for each of a cluster's SHARE blocks side by side. Blocks stay and go on from tile to tile,
// with CHUNKS of inputs each. All tiles of an expert are neighbours, those with the same weights first, so that these
// come from memory once.

constexpr int COLUMNS = (WIDTH + OUTS * SHARE - 1) / (OUTS * SHARE);  // tiles, or clusters of them, of the same routed tokens
constexpr int BAND = 16;  // tiles of routed tokens that take all columns before others do: the second-level cache has their x

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct Item {
    int expert, first, row, rows;  // first output of y; first place in the order of routed tokens, and how many
};

// A work item's description. It is asked for in two steps, each long before it is needed.
struct Lookup {
    int expert, start, begin, end;  // expert -1: there is no such item
};

// Tiles of routed tokens and columns, expert by expert. Read past the first-level cache, which another kernel may have
// filled before they were there.
struct Items {
    const int *offsets, *experts, *starts;
    int tiles;  // of routed tokens, at most

    __device__ Lookup seek(int index) const {
        const int tile = index / COLUMNS;
        if (tile >= tiles) return {-1, 0, 0, 0};
        return {__ldcg(experts + tile), __ldcg(starts + tile), 0, 0};
    }
    __device__ void find(Lookup& at) const {
        if (at.expert < 0) return;
        at.begin = __ldcg(offsets + at.expert), at.end = __ldcg(offsets + at.expert + 1);
    }
    // An expert's items are counted on from the first of its tiles of routed tokens: of a band all tiles have a column
    // in turn.
    __device__ Item item(int index, const Lookup& at) const {
        const int row_tiles = (at.end - at.begin + ROWS - 1) / ROWS;
        const int mine = index % COLUMNS + (at.start - at.begin) / ROWS * COLUMNS;
        const int band = mine / (BAND * COLUMNS) * BAND, here = min(BAND, row_tiles - band), rest = mine - band * COLUMNS;
        const int row = at.begin + (band + rest % here) * ROWS, column = rest / here * SHARE + cluster_rank() % SHARE;
        return {at.expert, column * OUTS, row, min(ROWS, at.end - row)};
    }
};

// The chunks of this block's items, one after the other.
struct Walk {
    const Items& items;
    int index = blockIdx.x / SHARE, chunk = 0;
    Lookup next;
    Item item;
    PipelineState pipe;

    __device__ Walk(const Items& items) : items(items) {
        next = items.seek(index);
        items.find(next);
        go_on();
    }
    __device__ inline bool more() const { return item.expert >= 0; }
    __device__ inline void go_on() {
        item.expert = -1;
        if (next.expert >= 0) item = items.item(index, next);
        index += gridDim.x / SHARE;
        next = items.seek(index);
    }
    __device__ inline void advance() {
        pipe.advance();
        if (++chunk == (CHUNKS + 1) / 2) items.find(next);
        if (chunk < CHUNKS) return;
        chunk = 0;
        go_on();
    }
};
#endif
