"""The CUDA driver and NVRTC, checked and typed; the only package that imports cuda.bindings."""
