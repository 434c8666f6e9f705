"""Models of scikit-learn, XGBoost and LightGBM, exported as their converters do it unless they are told otherwise."""

import warnings

import lightgbm
import numpy
import onnxmltools
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as Floats
from skl2onnx import to_onnx
from sklearn import (
    calibration,
    cluster,
    compose,
    cross_decomposition,
    datasets,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_extraction,
    gaussian_process,
    impute,
    linear_model,
    mixture,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

from subjects import Subject

FEATURES = 4
OPSET = {"": 17, "ai.onnx.ml": 3}


def classifiers():
    """With two and with three classes, whose labels are numbers; and some with names."""
    return {
        "logistic": linear_model.LogisticRegression(max_iter=500),
        "sgd": linear_model.SGDClassifier(loss="log_loss", random_state=1),
        "svc": svm.SVC(probability=True, random_state=1),
        "linear_svc": svm.LinearSVC(random_state=1),
        "tree": tree.DecisionTreeClassifier(max_depth=4, random_state=1),
        "forest": ensemble.RandomForestClassifier(20, max_depth=4, random_state=1),
        "boosting": ensemble.GradientBoostingClassifier(n_estimators=10, random_state=1),
        "histogram": ensemble.HistGradientBoostingClassifier(max_iter=10, random_state=1),
        "bayes": naive_bayes.GaussianNB(),
        "neighbours": neighbors.KNeighborsClassifier(3),
        "perceptrons": neural_network.MLPClassifier(hidden_layer_sizes=[8], max_iter=300, random_state=1),
        "discriminant": discriminant_analysis.LinearDiscriminantAnalysis(),
        "calibrated": calibration.CalibratedClassifierCV(linear_model.LogisticRegression(max_iter=500)),
        "voting": ensemble.VotingClassifier(
            [("a", linear_model.LogisticRegression(max_iter=500)), ("b", naive_bayes.GaussianNB())], voting="soft", flatten_transform=False
        ),
    }


def regressors():
    return {
        "linear": linear_model.LinearRegression(),
        "ridge": linear_model.Ridge(),
        "svr": svm.SVR(),
        "tree_regression": tree.DecisionTreeRegressor(max_depth=4, random_state=1),
        "forest_regression": ensemble.RandomForestRegressor(20, max_depth=4, random_state=1),
        "boosting_regression": ensemble.GradientBoostingRegressor(n_estimators=10, random_state=1),
        "neighbours_regression": neighbors.KNeighborsRegressor(3),
        "perceptrons_regression": neural_network.MLPRegressor(hidden_layer_sizes=[8], max_iter=300, random_state=1),
        "gaussian_process": gaussian_process.GaussianProcessRegressor(random_state=1),
    }


def others():
    """Those that learn without targets."""
    return {
        "scaler": preprocessing.StandardScaler(),
        "normaliser": preprocessing.Normalizer(),
        "polynomials": preprocessing.PolynomialFeatures(2),
        "components": decomposition.PCA(2),
        "clusters": cluster.KMeans(3, n_init=3, random_state=1),
        "mixture": mixture.GaussianMixture(3, random_state=1),
        "forest_of_outliers": ensemble.IsolationForest(n_estimators=10, random_state=1),
        "imputer": impute.SimpleImputer(),
    }


def all_of(folder):
    """Writes them and yields them as subjects."""
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    flowers, kinds = datasets.load_iris(return_X_y=True)
    flowers = flowers.astype(numpy.float32)
    names = numpy.array(["setosa", "versicolor", "virginica"])[kinds]
    made, subjects = {}, []
    for name, model in classifiers().items():
        made[f"skl_{name}"] = to_onnx(model.fit(flowers, kinds), flowers[:1], target_opset=OPSET)
    for name in ("logistic", "forest", "histogram"):
        two = classifiers()[name].fit(flowers, kinds // 2)
        made[f"skl_{name}_of_two"] = to_onnx(two, flowers[:1], target_opset=OPSET)
    named = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=500))
    made["skl_names"] = to_onnx(named.fit(flowers, names), flowers[:1], target_opset=OPSET)
    for name, model in regressors().items():
        made[f"skl_{name}"] = to_onnx(model.fit(flowers, flowers[:, 0]), flowers[:1], target_opset=OPSET)
    for name, model in others().items():
        made[f"skl_{name}"] = to_onnx(model.fit(flowers), flowers[:1], target_opset=OPSET)
    boosted = {
        "xgb_two": xgboost.XGBClassifier(n_estimators=10, max_depth=3).fit(flowers, kinds // 2),
        "xgb_three": xgboost.XGBClassifier(n_estimators=10, max_depth=3).fit(flowers, kinds),
        "xgb_regression": xgboost.XGBRegressor(n_estimators=10, max_depth=3).fit(flowers, flowers[:, 0]),
    }
    kind = [("input", Floats([None, FEATURES]))]
    for name, model in boosted.items():
        made[name] = onnxmltools.convert_xgboost(model, initial_types=kind, target_opset=15)
    leaves = {
        "lgbm_two": lightgbm.LGBMClassifier(n_estimators=10, verbose=-1).fit(flowers, kinds // 2),
        "lgbm_three": lightgbm.LGBMClassifier(n_estimators=10, verbose=-1).fit(flowers, kinds),
        "lgbm_regression": lightgbm.LGBMRegressor(n_estimators=10, verbose=-1).fit(flowers, flowers[:, 0]),
    }
    for name, model in leaves.items():
        made[name] = onnxmltools.convert_lightgbm(model, initial_types=kind, target_opset=15)
    for name, model in made.items():
        file = folder / f"{name}.onnx"
        file.write_bytes(model.SerializeToString())
        key = model.graph.input[0].name

        def rows(random, count, _, key=key):
            return {key: flowers[random.integers(0, len(flowers), count)]}

        subjects.append(Subject(name, file, rows))
    return subjects
