import subprocess
import sys


def test_the_gate_loads_neither_torch_nor_scipys_statistics():
    code = (
        "import sys, lipaudit.gate;"
        "print([m for m in ('torch', 'scipy', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
