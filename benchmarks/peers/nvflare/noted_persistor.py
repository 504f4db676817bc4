"""Stores the model in a file, as NVFlare's own persistor does; records when rounds are saved."""

import json
import time
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.app_common.np.np_model_persistor import NPModelPersistor


class NotedPersistor(NPModelPersistor):
    def __init__(self, record, model):
        super().__init__(source_ckpt_file_full_name=model)
        self.record = record

    def handle_event(self, event_type, fl_ctx):
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.END_RUN:
            self.note("ended")

    def save_model(self, model_learnable, fl_ctx):
        super().save_model(model_learnable, fl_ctx)
        self.note("committed")

    def note(self, what):
        with Path(self.record).open("a") as file:
            file.write(json.dumps({"what": what, "at": time.monotonic()}) + "\n")
