"""Two sums, of the even and of the odd numbers: the state belongs to the key."""

from holdfast import Application, Persistence

app = Application("sums", persistence=Persistence.none())
(
    app.dataframe(app.from_iterable(range(100)))
    .key_by(lambda n: n % 2)
    .stateful_map("sum", lambda key, value, state: (state + value, state + value), default=0)
    .inspect("print", print)
)

if __name__ == "__main__":
    app.run()
