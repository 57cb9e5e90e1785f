// Activation functions of the MLP, in float32.
#pragma once

// x * sigmoid(x); -> -0 for very negative x, where exp overflows to infinity.
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }
