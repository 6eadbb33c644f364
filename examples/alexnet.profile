parplan-layer-profile 1
# AlexNet for 64 images of 224 x 224, as one thread of a CPU ran it: every module alone, medians of 5 runs (8 at the
# smaller batches) on a machine that others used too, so take no figure for better than some 20 %. Sizes are counted.
# Nobody measured the optimizer's update. The format: docs/profile-graph.md. Try
#   parplan analyze --profile-graph examples/alexnet.profile --gpus 16 --gpu cpu --link 10gbe
model AlexNet
batch 64
device one thread of an x86 server CPU, torch 2.13.0
precision fp32
per batch

layer conv1 forward-s=0.2315 backward-s=0.1587 activation-bytes=49561600 parameter-bytes=93184 saved-bytes=38535168 kind=conv cut=in-channels:3,out-channels:64
times conv1 batch=4 forward-s=0.01174 backward-s=0.009836
times conv1 batch=16 forward-s=0.04118 backward-s=0.0327
layer relu1 forward-s=0.0129 backward-s=0.03264 activation-bytes=49561600 parameter-bytes=0 saved-bytes=49561600 kind=activation cut=channels:64
times relu1 batch=4 forward-s=0.0001257 backward-s=0.0003457
times relu1 batch=16 forward-s=0.0006662 backward-s=0.001691
layer pool1 forward-s=0.1315 backward-s=0.03436 activation-bytes=11943936 parameter-bytes=0 saved-bytes=35831808 kind=pool cut=channels:64
times pool1 batch=4 forward-s=0.0064 backward-s=0.0005778
times pool1 batch=16 forward-s=0.02531 backward-s=0.00215
layer conv2 forward-s=0.3497 backward-s=0.6851 activation-bytes=35831808 parameter-bytes=1229568 saved-bytes=0 kind=conv cut=in-channels:64,out-channels:192
times conv2 batch=4 forward-s=0.01911 backward-s=0.04282
times conv2 batch=16 forward-s=0.07248 backward-s=0.1528
layer relu2 forward-s=0.009566 backward-s=0.0234 activation-bytes=35831808 parameter-bytes=0 saved-bytes=35831808 kind=activation cut=channels:192
times relu2 batch=4 forward-s=9.476e-05 backward-s=0.0003013
times relu2 batch=16 forward-s=0.0004334 backward-s=0.001088
layer pool2 forward-s=0.07909 backward-s=0.02291 activation-bytes=8306688 parameter-bytes=0 saved-bytes=24920064 kind=pool cut=channels:192
times pool2 batch=4 forward-s=0.004047 backward-s=0.0004401
times pool2 batch=16 forward-s=0.01647 backward-s=0.001545
layer conv3 forward-s=0.1824 backward-s=0.3844 activation-bytes=16613376 parameter-bytes=2655744 saved-bytes=0 kind=conv cut=in-channels:192,out-channels:384
times conv3 batch=4 forward-s=0.011 backward-s=0.0259
times conv3 batch=16 forward-s=0.04152 backward-s=0.09847
layer relu3 forward-s=0.001151 backward-s=0.002588 activation-bytes=16613376 parameter-bytes=0 saved-bytes=16613376 kind=activation cut=channels:384
times relu3 batch=4 forward-s=5.066e-05 backward-s=0.0001397
times relu3 batch=16 forward-s=0.0001737 backward-s=0.0004375
layer conv4 forward-s=0.2648 backward-s=0.5786 activation-bytes=11075584 parameter-bytes=3539968 saved-bytes=0 kind=conv cut=in-channels:384,out-channels:256
times conv4 batch=4 forward-s=0.01471 backward-s=0.03322
times conv4 batch=16 forward-s=0.05754 backward-s=0.1305
layer relu4 forward-s=0.0009487 backward-s=0.00198 activation-bytes=11075584 parameter-bytes=0 saved-bytes=11075584 kind=activation cut=channels:256
times relu4 batch=4 forward-s=3.396e-05 backward-s=0.0001037
times relu4 batch=16 forward-s=0.0001068 backward-s=0.0002956
layer conv5 forward-s=0.1565 backward-s=0.3448 activation-bytes=11075584 parameter-bytes=2360320 saved-bytes=0 kind=conv cut=in-channels:256,out-channels:256
times conv5 batch=4 forward-s=0.009543 backward-s=0.02131
times conv5 batch=16 forward-s=0.03915 backward-s=0.08268
layer relu5 forward-s=0.0006983 backward-s=0.001884 activation-bytes=11075584 parameter-bytes=0 saved-bytes=11075584 kind=activation cut=channels:256
times relu5 batch=4 forward-s=3.413e-05 backward-s=0.0001067
times relu5 batch=16 forward-s=0.0001065 backward-s=0.0002855
layer pool5 forward-s=0.01751 backward-s=0.002002 activation-bytes=2359296 parameter-bytes=0 saved-bytes=7077888 kind=pool cut=channels:256
times pool5 batch=4 forward-s=0.001119 backward-s=0.0001226
times pool5 batch=16 forward-s=0.004444 backward-s=0.0004776
layer flatten forward-s=1.715e-05 backward-s=6.139e-05 activation-bytes=2359296 parameter-bytes=0 saved-bytes=0 kind=reshape cut=features:256
times flatten batch=4 forward-s=1.179e-05 backward-s=4.753e-05
times flatten batch=16 forward-s=1.303e-05 backward-s=5.139e-05
layer fc6 forward-s=0.08219 backward-s=0.2254 activation-bytes=1048576 parameter-bytes=151011328 saved-bytes=0 kind=linear cut=in-features:9216,out-features:4096
times fc6 batch=4 forward-s=0.02247 backward-s=0.1207
times fc6 batch=16 forward-s=0.03501 backward-s=0.1386
layer relu6 forward-s=5.533e-05 backward-s=0.0001484 activation-bytes=1048576 parameter-bytes=0 saved-bytes=1048576 kind=activation cut=features:4096
times relu6 batch=4 forward-s=1.706e-05 backward-s=6.573e-05
times relu6 batch=16 forward-s=2.682e-05 backward-s=9.261e-05
layer drop6 forward-s=0.004469 backward-s=0.0003153 activation-bytes=1048576 parameter-bytes=0 saved-bytes=1310720 kind=dropout cut=features:4096
times drop6 batch=4 forward-s=0.0002597 backward-s=6.084e-05
times drop6 batch=16 forward-s=0.0009828 backward-s=8.7e-05
layer fc7 forward-s=0.03996 backward-s=0.119 activation-bytes=1048576 parameter-bytes=67125248 saved-bytes=0 kind=linear cut=in-features:4096,out-features:4096
times fc7 batch=4 forward-s=0.009649 backward-s=0.05368
times fc7 batch=16 forward-s=0.01504 backward-s=0.05948
layer relu7 forward-s=6.462e-05 backward-s=0.0001841 activation-bytes=1048576 parameter-bytes=0 saved-bytes=1048576 kind=activation cut=features:4096
times relu7 batch=4 forward-s=1.541e-05 backward-s=5.904e-05
times relu7 batch=16 forward-s=2.139e-05 backward-s=7.633e-05
layer drop7 forward-s=0.004838 backward-s=0.0003111 activation-bytes=1048576 parameter-bytes=0 saved-bytes=1310720 kind=dropout cut=features:4096
times drop7 batch=4 forward-s=0.0002591 backward-s=5.944e-05
times drop7 batch=16 forward-s=0.0009549 backward-s=8.459e-05
layer fc8 forward-s=0.007676 backward-s=0.01761 activation-bytes=256000 parameter-bytes=16388000 saved-bytes=0 kind=linear cut=in-features:4096,out-features:1000
times fc8 batch=4 forward-s=0.001979 backward-s=0.005215
times fc8 batch=16 forward-s=0.003119 backward-s=0.00689

edge conv1 relu1
edge relu1 pool1
edge pool1 conv2
edge conv2 relu2
edge relu2 pool2
edge pool2 conv3
edge conv3 relu3
edge relu3 conv4
edge conv4 relu4
edge relu4 conv5
edge conv5 relu5
edge relu5 pool5
edge pool5 flatten
edge flatten fc6
edge fc6 relu6
edge relu6 drop6
edge drop6 fc7
edge fc7 relu7
edge relu7 drop7
edge drop7 fc8
