"""The step's seconds as costs that add up and maxima: from priced parts of layers and edges to T (docs/objective.md).

Forward: layers run one after another. In passes, samples for the next pass and results of the last one travel beside
the compute of a pass, so every pass but one takes the longest of

    C                 compute in the passes, with the transfers W between layers there, which hold it up
    h X + W           samples that go in; h is the share that travels beside compute (StepCost.overlap)
    h Y + W           results that come out
    h (X + Y) + W     where both use the same lanes (interleave)

and (1 - h) (X + Y). Backward is the same with gradients. Gradient sums start when a layer's backward of the last pass
is done and go one after another on each device; then a device updates what it holds. With D_i the moment when layer
i's backward is done, and E_i that when its sum and those of all layers behind it are,

    E_i = max(E_i+1, D_i) + sum_i          T = forward + max(D_0, E_0 + updates)

for every device that is followed. Of M micro-batches all but the last add forward and backward without sums,

    T = M forward + (M - 1) backward + max(D_0, E_0 + updates)

but for sums to slices, which are part of every one: (M - 1) max(D_0, E_0) then, of those sums alone.

Weights that lie in slices are gathered one gather group ahead (graph/repeated.py), by the links of the sums. With F_u
and G_u the seconds of group u's forward, and of its gathers,

    forward = max(arrivals, G_1) + max(F_1, G_2) + ... + max(F_n-1, G_n) + F_n

and backward the gathers of group u - 1 begin when group u does, behind the sums of u + 1 and before its own; group
u - 1 begins when they are there, too: E = max(E, D) + G_u-1, then D = max(D of group u, that E). Compute beside a
gather takes the share longer by which they hold each other up.

D_i counts in E_i on the devices that layer i uses only. A device also sends back the gradients of what it read before
it updates. E_i is also at least the backward of the device's own layers down to i, and T at least all of it: that never
sets T, but bounds it well where options are mixed, of which D_i then counts too little.

A layer that stands for the equal layers of many repeated blocks (graph/repeated.py) counts as often, and no gradient
sum waits for its D_i: over the blocks in between, D_i and E_i change by the same each, so the most is that of the first
or the last block, which are there themselves. Where their weights are gathered again, E and D are each at least what
its own work is from block to block, and what the last block waits for: T is no more than the step then, by less than
what the gathers of one block and the compute beside them differ by in each.

Branches that run at the same time on disjoint devices are tracks of a phase: its forward is the longest of the tracks'
own, and so is its backward.
"""
