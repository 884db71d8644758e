"""Rows that become columns."""

import numpy as np

from sim.record import Table


def test_more_rows_than_are_turned_at_a_time_keep_their_places():
    rows = np.arange(30_000).reshape(10_000, 3)
    table = Table(["a", "b", "c"])
    for row in rows[:5_000].tolist():
        table.rows += table.pack(*row)
    table.append_columns({"a": rows[5_000:, 0], "b": rows[5_000:, 1], "c": rows[5_000:, 2]}, 5_000)
    assert len(table) == 10_000
    columns = table.take_columns()
    assert {name: values.tolist() for name, values in columns.items()} == {
        name: rows[:, index].tolist() for index, name in enumerate("abc")
    }
    assert len(table) == 0
