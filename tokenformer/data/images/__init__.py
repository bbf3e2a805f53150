"""Images for training and evaluation: where they come from, how they are decoded and cropped, and what a batch holds.

A micro-batch of B images of S × S pixels has these NumPy fields:

    pixels   (B, S, S, 3)  uint8    red, green, blue; decoded, upright and cropped, not yet flipped or augmented
    label    (B,)          int64    number of the class; -100 (IGNORED) in a row that holds no image
    damaged  (B,)          int32    1 where the image of this row could not be decoded (`data.images.damaged: skip`)
    draws    (B, K)        float32  what augmentation will do to the image; training alone has this field

Every random choice is made here, from (seed, epoch, sample), so that `ops/augment.py` only applies it. The columns of
`draws` (`DRAWS` in config_data.py, K = 10 + 2 · randaugment_ops):

    flip                            1: mirror the image left to right
    erase_top, erase_left,          the rectangle that is filled with noise, in pixels; a height of 0 erases nothing
      erase_height, erase_width
    erase_key                       a whole number below 2²⁴ that the noise is computed from
    mix                             0: not mixed, 1: mixup, 2: cutmix
    mix_share                       λ, the share of the image itself; 1 - λ is its partner's
    cut_row, cut_column             the centre of the rectangle of cutmix, as a share of the height and the width
    operation, level                for each operation of RandAugment: its number in `OPERATIONS` (-1: none), and how
                                    strong it is, -10 to 10

The partner of row r is row r XOR 1, and the pair is mixed as the last four of these numbers say in its even row. So the
batch, the share of each rank and the micro-batch must be even (`check_even` in samples.py).

A task opens its data with

    images = open_images(config.data, part)         opening.py; part: train, validation or test; `images.classes` names
    loader = image_loader(config.data, images, size=S, seed=seed, training=True, batch=…, micro_batch=…, rank=…, …)
    x, targets = augment(batch, settings, classes)  ops/augment.py: (B, 3, S, S) normalised, (B, classes) soft targets,
                                                    0 in ignored rows; `pixels` and `label` lie on the device, `draws`
                                                    on the host, where it decides without waiting for the device

In training, another image takes the place of one that is damaged. In evaluation its row stays empty: label -100.
"""
