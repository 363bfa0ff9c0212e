"""Records that retention deleted before they were read: an error that names them, and the way on.

An application that was away for longer than its topic keeps records cannot read them any more. It never jumps over such
a gap in silence: it stops with from and to, and `on_data_loss="skip"` goes on and keeps the gap in the checkpoint.
"""

import os
import tempfile
import time

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from holdfast import Application
from holdfast.errors import OffsetsLost

BROKER = os.environ.get("BROKER_ADDRESS", "localhost:9092")
RUN = f"{time.time():.0f}"  # names of its own for every run of this example
STATE_DIR = tempfile.mkdtemp()


def application(**options) -> Application:
    app = Application(
        f"news-{RUN}", broker_address=BROKER, state_dir=STATE_DIR, auto_offset_reset="earliest", **options
    )
    app.dataframe(app.topic(f"news-{RUN}")).print()
    return app


def publish(app: Application, *numbers: int) -> None:
    with app.get_producer() as producer:
        for number in numbers:
            producer.produce(f"news-{RUN}", str(number))


if __name__ == "__main__":
    app = application()
    publish(app, 0, 1)
    app.run(available_now=True)

    publish(app, 2, 3, 4)
    print("-- the topic deletes what is before offset 4; two of it were not read yet")
    admin = AdminClient({"bootstrap.servers": BROKER})
    for deleted in admin.delete_records([TopicPartition(f"news-{RUN}", 0, 4)]).values():
        deleted.result()
    try:
        app.run(available_now=True)
    except OffsetsLost as error:
        print(f"-- {type(error).__name__}: {error}")
    application(on_data_loss="skip", spark=app.spark).run(available_now=True)
