"""The running sum of 0 to 99 under one key, with `stateful_map`: state in, output and new state out."""

from holdfast import Application, Persistence


def add(key: int, n: int, total: int) -> tuple[int, int]:
    return total + n, total + n


app = Application("running-sum", persistence=Persistence.none())
app.dataframe(app.from_iterable(range(100))).key_by(lambda n: 0).stateful_map("sum", add, default=0).inspect(print)

if __name__ == "__main__":
    app.run()
