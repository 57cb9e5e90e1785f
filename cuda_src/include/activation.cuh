// Activation functions of the MLP, in float32.
#pragma once

// x * sigmoid(x), within a few ulp. The fast quotient is -0 for divisors above 2^126 (x < -87), where
// the true one is below 1e-35.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
