"""`atroposlib` 0.4.0 as environments see it: its modules and their names, on Headrace.

Importing this makes `import atroposlib.…` find the modules here, in this process; `headrace env FILE` does so for the
file that it runs. An atroposlib that is installed beside it is passed over, and a warning says so.

The packages mirror atroposlib's module tree: every module that environments import is a file here, most of them only
naming what Headrace has. That keeps imports of unchanged environments working, so these small files are not merged.
"""

from headrace.compat.atropos.finder import install

install()
