"""Print every field of the record as a Markdown table, for docs/monitoring.md.

python -m fl_dist.metrics
"""

from fl_dist.common import terminal
from fl_dist.metrics.record import markdown_table

if __name__ == "__main__":
    terminal.prepare_terminal()
    print(markdown_table())
