// Copies pieces of memory, one warp a piece, as many pieces at a time as the grid has warps.

struct alignas(32) Piece {  // one 32-byte sector, so that a table in host memory is read in single transfers
    unsigned long long src, dst, nbytes, unused;
};

constexpr unsigned kLanes = 32;
constexpr unsigned kAhead = 8;  // loads a lane has under way

template <typename Word>
__device__ void copy_words(unsigned long long src, unsigned long long dst, unsigned long long count, unsigned lane) {
    const Word *from = reinterpret_cast<const Word *>(src);
    Word *to = reinterpret_cast<Word *>(dst);
    unsigned long long at = lane;
    for (; at + (kAhead - 1) * kLanes < count; at += kAhead * kLanes) {
        Word words[kAhead];
#pragma unroll
        for (unsigned k = 0; k < kAhead; ++k) words[k] = from[at + k * kLanes];
#pragma unroll
        for (unsigned k = 0; k < kAhead; ++k) to[at + k * kLanes] = words[k];
    }
    for (; at < count; at += kLanes) to[at] = from[at];
}

// Source and target have the same distance to the next boundary of a Word: bytes up to it, words, bytes after the last.
template <typename Word>
__device__ void copy_aligned(const Piece &piece, unsigned lane) {
    unsigned long long head = (0 - piece.src) & (sizeof(Word) - 1);
    if (head > piece.nbytes) head = piece.nbytes;
    const unsigned long long words = (piece.nbytes - head) / sizeof(Word);
    const unsigned long long tail = head + words * sizeof(Word);
    copy_words<unsigned char>(piece.src, piece.dst, head, lane);
    copy_words<Word>(piece.src + head, piece.dst + head, words, lane);
    copy_words<unsigned char>(piece.src + tail, piece.dst + tail, piece.nbytes - tail, lane);
}

extern "C" __global__ void __launch_bounds__(512) copy_runs(const Piece *pieces, unsigned count) {
    const unsigned lane = threadIdx.x % kLanes;
    const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
    const unsigned num_warps = gridDim.x * blockDim.x / kLanes;
    for (unsigned index = warp; index < count; index += num_warps) {
        const Piece piece = pieces[index];
        const unsigned long long apart = piece.src ^ piece.dst;
        if (apart % 16 == 0) {
            copy_aligned<uint4>(piece, lane);
        } else if (apart % 4 == 0) {
            copy_aligned<unsigned int>(piece, lane);
        } else {
            copy_words<unsigned char>(piece.src, piece.dst, piece.nbytes, lane);
        }
    }
}
