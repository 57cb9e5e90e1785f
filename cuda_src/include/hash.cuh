// A stateless hash of an element's index: the random values of dummy weights.
#pragma once

#include "common.cuh"

// 32 mixed bits of (64-bit index, key), of which the upper 16 are the random number: two rounds
// of xor-shift and multiply (multipliers with low bias, found by search by C. Wellons), without a
// last xor-shift, which would leave the upper half as it is. The key enters before and between
// the rounds, so that two keys do not give the same sequence in another order.
__device__ __forceinline__ u32 hash_index(u64 index, u32 key) {
  u32 h = static_cast<u32>(index) ^ key;
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h += static_cast<u32>(index >> 32) * 0x9e3779b9u + key * 0x85ebca6bu;
  return (h ^ (h >> 15)) * 0x846ca68bu;
}
