import pytest

from tinyvllm.driver.spec import Kernel
from tinyvllm.util import DType

SCALE = Kernel("scale.cu", "scale_kernel", "ptr x, f32 factor, i32 n")


def test_params_come_from_the_signature():
    assert SCALE.params == (("ptr", "x"), ("f32", "factor"), ("i32", "n"))


def test_name_expression_spells_template_arguments_in_cpp():
    assert SCALE(DType.BF16, 8, True).name == "scale_kernel<__nv_bfloat16, 8, true>"
    assert SCALE().name == "scale_kernel"


def test_equal_specialisations_are_one_key():
    assert len({SCALE(DType.F32, 4), SCALE(DType.F32, 4), SCALE(DType.F32, 8)}) == 2


def test_launch_orders_arguments_and_completes_the_grid():
    launch = SCALE(4).launch((7, 2), 128, smem=64, n=5, x=4096, factor=0.5)
    assert launch.args == (4096, 0.5, 5)
    assert (launch.grid, launch.block, launch.smem) == ((7, 2, 1), 128, 64)
    assert launch.cluster == 1
    assert SCALE(4).launch((8,), 128, cluster=4, n=5, x=4096, factor=0.5).cluster == 4


@pytest.mark.parametrize("args", [{"x": 1, "factor": 2.0}, {"x": 1, "factor": 2.0, "n": 1, "m": 1}])
def test_launch_wants_every_parameter_once(args):
    with pytest.raises(TypeError, match="scale_kernel"):
        SCALE(4).launch((1,), 32, **args)
