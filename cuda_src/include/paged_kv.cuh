// Where the keys and values of one KV head of one sequence lie in the paged cache.
#pragma once

#include "common.cuh"

// The cache is [block, layer, 2 (K, V), kv_head, block_size, head_dim]; token position p of a
// sequence lives in block table[p / block_size] at place p % block_size. A kernel gets the address
// of its layer in block 0, so that a block is one multiplication away; products with the block id
// pass 2^31 and are taken in 64 bits. T is const for readers.
template <typename T> struct PagedKv {
  T* base;           // this layer's and head's K tile [block_size, head_dim] in block 0
  i64 block_stride;  // elements from a block to the next
  i64 v_offset;      // elements from a K tile to its V tile
  const i32* table;  // block ids of the sequence [max_blocks]; entries beyond its length: garbage
  int block_shift;   // log2(block_size)
  int head_dim;

  __device__ __forceinline__ PagedKv(T* layer, i64 block_stride, int num_kv_heads, int kv_head,
                                     const i32* block_tables, int max_blocks, int slot,
                                     int block_shift, int head_dim)
      : base(layer + (static_cast<i64>(kv_head) << block_shift) * head_dim),
        block_stride(block_stride),
        v_offset((static_cast<i64>(num_kv_heads) << block_shift) * head_dim),
        table(block_tables + static_cast<i64>(slot) * max_blocks),
        block_shift(block_shift),
        head_dim(head_dim) {}

  __device__ __forceinline__ int block(int position) const {
    return table[position >> block_shift];
  }

  // Where the key [head_dim] of a token position in this block is, from `base`.
  __device__ __forceinline__ i64 offset(int block, int position) const {
    const int place = position & ((1 << block_shift) - 1);
    return block * block_stride + place * head_dim;
  }

  __device__ __forceinline__ i64 offset(int position) const {
    return offset(block(position), position);
  }

  // The key itself; its value is v_offset elements further.
  __device__ __forceinline__ T* key(int block, int position) const {
    return base + offset(block, position);
  }

  __device__ __forceinline__ T* key(int position) const { return base + offset(position); }
};
