// The kernels of copy_chunks.cu as ordinary C++: their threads run one after another, which they allow, since none waits
// for another. KERNEL is the path of the source.

struct Index {
    unsigned x;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

#define __device__
#define __global__
#define __launch_bounds__(threads)
#include KERNEL

extern "C" void run_copy_chunks(unsigned ctas, const Strip *strips, u64 num_strips, const int *ids, u64 blocks,
                                u64 chunk_bytes, u64 begin, u64 end, u64 staging, unsigned to_flat) {
    gridDim.x = ctas;
    blockDim.x = 512;
    for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            copy_chunks(strips, num_strips, ids, blocks, chunk_bytes, begin, end, staging, to_flat);
        }
    }
}

extern "C" void run_copy_pairs(unsigned ctas, const Pair *pairs, u64 num_pairs, const int *to_ids, const int *from_ids,
                               u64 blocks) {
    gridDim.x = ctas;
    blockDim.x = 512;
    for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            copy_pairs(pairs, num_pairs, to_ids, from_ids, blocks);
        }
    }
}
