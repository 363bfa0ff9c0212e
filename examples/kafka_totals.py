"""Running totals from topic to topic, exactly once; `make demo-kafka` brings a broker along.

Orders go into one topic, totals come out of another. Whoever reads only what is committed sees each total once, and
those of one customer in order, however often the application was killed in between.
"""

import json
import os
import random
import tempfile
import time

from confluent_kafka import Consumer

from holdfast import Application, State, TopicConfig

BROKER = os.environ.get("BROKER_ADDRESS", "localhost:9092")
RUN = f"{time.time():.0f}"  # names of its own for every run of this example

app = Application(f"totals-{RUN}", broker_address=BROKER, auto_offset_reset="earliest", state_dir=tempfile.mkdtemp())
orders = app.topic(f"orders-{RUN}", config=TopicConfig(num_partitions=2))
totals = app.topic(f"totals-{RUN}", config=TopicConfig(num_partitions=2))


def running_total(order: dict, state: State) -> dict:
    total = state.get("total", default=0) + order["cents"]
    state.set("total", total)
    return {**order, "total": total}


app.dataframe(orders).apply(running_total, stateful=True).to_topic(totals)

if __name__ == "__main__":
    sent = [(f"customer-{random.randrange(500)}", random.randrange(100, 9_000)) for _ in range(20_000)]
    with app.get_producer() as producer:
        for customer, cents in sent:
            producer.produce(orders, json.dumps({"cents": cents}), key=customer)
    app.run(available_now=True)

    settings = {"bootstrap.servers": BROKER, "group.id": f"reader-{RUN}", "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "isolation.level": "read_committed"})
    consumer.subscribe([totals.name])
    found = consumer.consume(len(sent), timeout=20) + consumer.consume(1, timeout=1)  # one too many would be seen
    last = {message.key().decode(): json.loads(message.value())["total"] for message in found}
    expected: dict[str, int] = {}
    for customer, cents in sent:
        expected[customer] = expected.get(customer, 0) + cents
    print(f"{len(sent):,} orders in, {len(found):,} totals out")
    print(f"customer-7 has spent {last['customer-7'] / 100:,.2f}")
    print(f"the last totals of {len(last)} customers equal a recomputation: {last == expected}")
