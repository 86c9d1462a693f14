# Installs the C++ library into a folder of its own, and builds and runs examples/cpp against it, as a user would: with
# default flags, from another folder.
#
#   cmake -DBUILD=<build folder> -DSOURCE=<examples/cpp> -DWORK=<scratch folder> -DGENERATOR=<name> -DMAKE_PROGRAM=<path>
#         -DCOMPILER=<path> [-DTORCH_DIR=<folder>] [-DLAUNCHER=<ccache>] -P installed_library.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE out)
  message(STATUS "${out}")
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "${line}\nended with ${status}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK}/installed ${WORK}/examples)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/installed --component cpp)
file(COPY ${SOURCE}/ DESTINATION ${WORK}/examples)
run(${CMAKE_COMMAND} -S ${WORK}/examples -B ${WORK}/examples/build -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}
    -DCMAKE_PREFIX_PATH=${WORK}/installed -DKNAPFORMER_TORCH_DIR=${TORCH_DIR})
run(${CMAKE_COMMAND} --build ${WORK}/examples/build)
run(${WORK}/examples/build/plan)
if(TORCH_DIR)
  run(${WORK}/examples/build/train)
endif()

# The core's headers name nothing of Torch, Python or nlohmann-json.
file(GLOB_RECURSE headers ${WORK}/installed/include/knapformer/core/*.h)
foreach(header ${headers})
  file(STRINGS ${header} foreign REGEX "#include <(torch|ATen|c10|pybind11|Python|nlohmann)")
  if(foreign)
    message(FATAL_ERROR "${header}: ${foreign}")
  endif()
endforeach()
