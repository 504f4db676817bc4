"""Returns the model with each value changed."""

import numpy as np
import nvflare.client as flare
from nvflare.apis.fl_constant import FLMetaKey


def main():
    flare.init()
    site = int(flare.get_site_name().rpartition("-")[2])
    change = np.float32(1e-3 * (site + 1))
    while flare.is_running():
        model = flare.receive()
        update = {name: array + change for name, array in model.params.items()}
        meta = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: 2}
        flare.send(flare.FLModel(params=update, params_type=flare.ParamsType.FULL, meta=meta))


if __name__ == "__main__":
    main()
