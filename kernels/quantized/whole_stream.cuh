// quantized_experts.cu loads an n-tile through registers, a whole packed tile at a time.
constexpr int STREAMED = SPAN;  // inputs
typedef PackedTile Streamed;
struct Stream {
    PackedTiles all;

    Stream() = default;
    __device__ Stream(const unsigned char* from, int lane) : all(from, lane) {}
    __device__ Streamed get(int more) const { return all.stream(more); }
    __device__ void advance(int count) { all.advance(count); }
};
