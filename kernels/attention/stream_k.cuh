// How decode.cu's blocks share out what is read. Index arithmetic alone: tests/kernels/attention/test_stream_k.py has a
// CPU do it, too.
//
// TMA's boxes of all sequences stand in one row, a sequence of which nothing is read as one, and are cut into
// runs of as many boxes each. A border near a sequence's beginning or end moves there, as a part costs more than what
// it is moved by. Each block finds its two borders alone; of a sequence that they divide, also which runs have parts of
// it.

constexpr int PER_TILE = TILE / BOX;  // boxes

struct Span {  // of a sequence: the tokens that are read from the cache
    int length, first, last, start;  // `start`: of the first one's box

    __device__ Span(int length) : length(length) {
        first = WINDOW ? max(length - WINDOW, 0) : 0, last = max(length - ROTATE, 0), start = first / BOX * BOX;
    }
    __device__ int boxes() const { return max((last - start + BOX - 1) / BOX, 1); }
    __device__ int tiles() const { return (boxes() + PER_TILE - 1) / PER_TILE; }
};

struct Border {  // between runs: before box `box` of sequence b. Where that divides b, `count` runs from `first` on have parts
    int b, box, first, count;
};

struct StreamKRuns {  // of `boxes` in `tiles`, as many as are wanted if each has LEAST tiles, so that short sequences stay whole
    int count, each, longer;  // boxes of each run; the first `longer` have one more
    int near;                 // how many boxes a border is moved by at most: half a tile, and no two meet

    __device__ StreamKRuns(int boxes, int tiles, int wanted) : count(max(min(wanted, tiles / LEAST), 1)) {
        each = boxes / count, longer = boxes - each * count, near = min(PER_TILE / 2, (each - 1) / 2);
    }
    __device__ int begin(int run) const { return each * run + min(run, longer); }
    __device__ int begins_from(int box) const {  // the first run that begins there or later
        const int early = box <= (each + 1) * longer, boxes = each + early;
        return (box - (early ? 0 : longer) + boxes - 1) / boxes;
    }
    // Where `run` begins: in sequence b, whose boxes stand from `at` on.
    __device__ Border border(int run, int b, int at, int boxes) const {
        Border border = position(run, b, at, boxes);
        if (border.box > 0) {
            const int first = begins_from(at + near + 1), last = begins_from(at + boxes - near);
            border.first = first - 1, border.count = last - first + 1;
        }
        return border;
    }
    // The same without the runs that have parts, which takes two divisions.
    __device__ Border position(int run, int b, int at, int boxes) const {
        const int box = begin(run) - at;
        if (box <= near) return {b, 0, 0, 0};
        return box >= boxes - near ? Border{b + 1, 0, 0, 0} : Border{b, box, 0, 0};
    }
};

struct Way {  // of a block through its run, from borders[0] to borders[1]: tokens `at` to `stop` of sequence b
    const int* lengths;
    const Border* borders;
    int b, at, stop;

    __device__ Way(const int* lengths, const Border* borders) : lengths(lengths), borders(borders), b(borders[0].b) {
        enter(borders[0].box);
    }
    __device__ void enter(int box) {
        const Span span(lengths[b]);
        at = span.start + box * BOX, stop = b == borders[1].b ? span.start + borders[1].box * BOX : span.last;
    }
    __device__ bool next() {
        b++;
        if (b > borders[1].b || (b == borders[1].b && borders[1].box == 0)) return false;
        enter(0);
        return true;
    }
    __device__ bool newest(const Span& span) const { return ROTATE && stop == span.last && span.length > 0; }
};
