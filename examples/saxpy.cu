// y = a * x + y; n need not be a multiple of the block.
template <int kBlock>
__global__ void saxpy(const float* __restrict__ x, float* __restrict__ y, float a, int n) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
