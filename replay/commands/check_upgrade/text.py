"""Print the result of `replay check-upgrade`: two environments beside each other, and how far they are apart.

result   AGREE: no number differs by more than rounding explains

         old                   new
torch    2.11.0                2.13.0
verdict  REPRODUCED            REPRODUCED
forward  12.1 ms               11.8 ms

quantity       largest difference    bound
loss                      8.5e-08  7.1e-06
"""

from replay.commands.check_upgrade.result import (
    MEANINGS,
    UpgradeCheck,
    list_remarks,
    make_environment_table,
    make_quantity_table,
)
from replay.output.printing import open_console, print_line, print_pairs, print_table


def print_check(result: UpgradeCheck) -> None:
    out = open_console()
    print_pairs(out, [("result", f"{result.result}: {MEANINGS[result.result]}")])
    for table in (make_environment_table(result), make_quantity_table(result)):
        print_line(out)
        print_table(out, table)
    print_line(out)
    print_pairs(out, list_remarks(result))
