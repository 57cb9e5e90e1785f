"""Operations: each declared once with its shape contract, cost, CUDA launch and NumPy reference."""
