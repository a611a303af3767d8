// Copies between paged blocks and a staging buffer, and from the blocks of one cache to those of another: one warp a
// strip of one block.

typedef unsigned long long u64;

struct Strip {   // a piece of a plane that is short enough for one warp
    u64 start;   // address in block 0
    u64 stride;  // from one block to the next
    u64 nbytes;
    u64 place;   // in a flat chunk, for the chunk's first block
    u64 pitch;   // there from one block to the next
};

constexpr unsigned kLanes = 32;
constexpr unsigned kAhead = 8;  // loads a lane has under way

template <typename Word>
__device__ void copy_words(u64 src, u64 dst, u64 count, unsigned lane) {
    const Word *from = reinterpret_cast<const Word *>(src);
    Word *to = reinterpret_cast<Word *>(dst);
    u64 at = lane;
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
__device__ void copy_aligned(u64 src, u64 dst, u64 nbytes, unsigned lane) {
    u64 head = (0 - src) & (sizeof(Word) - 1);
    if (head > nbytes) head = nbytes;
    const u64 words = (nbytes - head) / sizeof(Word);
    const u64 tail = head + words * sizeof(Word);
    copy_words<unsigned char>(src, dst, head, lane);
    copy_words<Word>(src + head, dst + head, words, lane);
    copy_words<unsigned char>(src + tail, dst + tail, nbytes - tail, lane);
}

__device__ void copy_bytes(u64 src, u64 dst, u64 nbytes, unsigned lane) {
    const u64 apart = src ^ dst;
    if (apart % 16 == 0) {
        copy_aligned<uint4>(src, dst, nbytes, lane);
    } else if (apart % 4 == 0) {
        copy_aligned<unsigned int>(src, dst, nbytes, lane);
    } else {
        copy_words<unsigned char>(src, dst, nbytes, lane);
    }
}

// Bytes `begin` to `end` of the chunks, taken one after another; byte `begin` lies at address `staging`.
// Chunk c has the blocks ids[c * blocks] and following; an id below 0 stands for a block that is left as it is.
extern "C" __global__ void __launch_bounds__(512)
    copy_chunks(const Strip *strips, u64 num_strips, const int *ids, u64 blocks, u64 chunk_bytes, u64 begin, u64 end,
                u64 staging, unsigned to_flat) {
    const unsigned lane = threadIdx.x % kLanes;
    const u64 warp = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
    const u64 num_warps = gridDim.x * blockDim.x / kLanes;
    const u64 a_chunk = num_strips * blocks;
    const u64 last = (end + chunk_bytes - 1) / chunk_bytes * a_chunk;
    for (u64 item = begin / chunk_bytes * a_chunk + warp; item < last; item += num_warps) {
        const u64 chunk = item / a_chunk;
        const u64 within = item - chunk * a_chunk;
        const u64 index = within / blocks;
        const u64 block = within - index * blocks;
        const Strip strip = strips[index];
        const int id = ids[chunk * blocks + block];
        const u64 at = chunk * chunk_bytes + strip.place + block * strip.pitch;
        const u64 first = at > begin ? at : begin;
        const u64 stop = at + strip.nbytes < end ? at + strip.nbytes : end;
        if (id < 0 || first >= stop) continue;
        const u64 paged = strip.start + static_cast<u64>(id) * strip.stride + (first - at);
        const u64 staged = staging + (first - begin);
        copy_bytes(to_flat ? paged : staged, to_flat ? staged : paged, stop - first, lane);
    }
}

struct Pair {  // a piece of a block that is short enough for one warp, where it goes to and where it comes from
    u64 to;    // address in block 0
    u64 to_stride;
    u64 from;
    u64 from_stride;
    u64 nbytes;
};

// Block i of the copy is block from_ids[i] of the source and becomes block to_ids[i].
extern "C" __global__ void __launch_bounds__(512)
    copy_pairs(const Pair *pairs, u64 num_pairs, const int *to_ids, const int *from_ids, u64 blocks) {
    const unsigned lane = threadIdx.x % kLanes;
    const u64 warp = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
    const u64 num_warps = gridDim.x * blockDim.x / kLanes;
    for (u64 item = warp; item < num_pairs * blocks; item += num_warps) {
        const u64 block = item / num_pairs;
        const Pair pair = pairs[item - block * num_pairs];
        copy_bytes(pair.from + static_cast<u64>(from_ids[block]) * pair.from_stride,
                   pair.to + static_cast<u64>(to_ids[block]) * pair.to_stride, pair.nbytes, lane);
    }
}
