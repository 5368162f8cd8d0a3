"""timm is imported without torch's compiler, which still works afterwards."""

import subprocess
import sys

CODE = """
import gc, sys
from lipaudit.models.sources import imports

imports.import_library("timm")
import timm, torch
from torchvision.ops import roi_align

assert gc.isenabled() and "torch._dynamo" not in sys.modules
model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
image = torch.ones(1, 3, 32, 32)
expected = model(image)
roi_align(image, [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2)
assert "torch._dynamo" not in sys.modules

# What timm marked while it was imported is not compiled; all else is.
seen = []
def f(x):
    seen.append(torch.compiler.is_compiling())
    return x + 1
marked = imports._disable_later(torch.compiler.disable, f)
decorated = imports._disable_later(torch.compiler.disable, recursive=False)(f)
for function in (marked, decorated, f):
    compiled = torch.compile(lambda x: function(x) * 2, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
assert seen == [False, False, True], seen
assert torch.allclose(torch.compile(model, backend="eager")(image), expected, atol=1e-6)
from torch._dynamo.utils import is_compile_supported
stand_in = imports._Utilities("torch._dynamo.utils")
assert stand_in.is_compile_supported("cpu") == is_compile_supported("cpu")
assert stand_in.counters is sys.modules["torch._dynamo.utils"].counters
"""


def test_timm_is_imported_without_the_compiler_which_works_afterwards():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
